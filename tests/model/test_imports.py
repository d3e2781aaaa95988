"""The model runs on a machine that has torch, numpy, pillow, tokenizers and safetensors, and nothing else of ours."""

import subprocess
import sys

CHECK = """
import importlib, pkgutil, sys
import torch, numpy, PIL.Image, tokenizers, safetensors.torch

class Refuse:
    allowed = {"worker", "torch", "numpy", "PIL", "tokenizers", "safetensors", *sys.stdlib_module_names}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.allowed:
            raise ImportError(f"{name} is not to be imported")

sys.meta_path.insert(0, Refuse())
import worker.model
names = [module.name for module in pkgutil.iter_modules(worker.model.__path__)]
for name in [*(f"worker.model.{name}" for name in names), "worker.moderator", "worker.weights"]:
    importlib.import_module(name)
print(*sorted(names))
"""


def test_the_model_imports_nothing_but_its_five_libraries() -> None:
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=100)

    assert done.stderr == ""
    assert done.stdout.split() == [
        "checkpoint",
        "config",
        "decode",
        "ofa",
        "preprocess",
        "resnet",
        "tokenizer",
        "weight_files",
    ]
