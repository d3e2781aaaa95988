"""Make `.venv` and install Concord into it with the pinned versions: `PYTHON infra/environment.py`.

Runs on the standard library alone, before anything is installed. The index, proxies and certificates are those of the
user's own pip configuration. A torch that PYTHON can import already is used as it is, never downloaded again.
"""

from __future__ import annotations  # so that an older Python gets as far as the sentence that it is too old

import hashlib
import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PIP = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
EXTRAS = "worker,local,parquet,report,dev"

#: The oldest Python and torch that Concord runs on, as in pyproject.toml.
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 10)

#: Downloads in gigabytes: everything but torch, torch's builds for the CPU, and for CUDA with its libraries.
OTHERS_GB = "0.2"
TORCH_CPU_GB = "0.2"
TORCH_CUDA_GB = "3"
#: What the CUDA build takes once it is unpacked.
TORCH_CUDA_DISK_GB = "5"


def main() -> None:
    if is_current():
        return
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(f"Concord needs Python 3.11 or newer, and {sys.executable} is older: make PYTHON=python3.12 ...")
    outside = torch_outside()
    if not ((VENV / "bin" / "python").exists() and site_packages().exists()):
        # What may be there was left by an interrupted run, or is of another Python.
        shutil.rmtree(VENV, ignore_errors=True)
        if importlib.util.find_spec("ensurepip") is None:
            sys.exit(f"{sys.executable} cannot make virtual environments: install python3-venv, or use another PYTHON.")
        print(f"Making {VENV} with {sys.executable} ({platform.python_version()})", flush=True)
        venv.create(VENV, with_pip=True)
    constraints = (ROOT / "constraints.txt").read_text()
    if outside is not None:
        folder, version = outside
        print(f"Using the torch {version} of {folder}.", flush=True)
        (site_packages() / "torch_outside.pth").write_text(f"{folder}\n")
        constraints = re.sub(r"^torch==.*$", f"torch=={version}", constraints, flags=re.MULTILINE)
    else:
        announce(pinned_torch(constraints))
    used = VENV / "constraints.txt"
    used.write_text(constraints)
    # A person sees what comes, with bars; a log does not need them.
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    install = [*PIP, "install", *quiet, "--editable", f"{ROOT}[{EXTRAS}]", "--constraint", str(used)]
    if subprocess.run(install, cwd=ROOT, check=False).returncode:
        sys.exit("pip could not install what Concord needs; the lines above say why.")
    stamp().write_text(fingerprint())


def stamp() -> Path:
    """The file that says for which pyproject.toml and constraints.txt the environment was made."""
    return VENV / "made-for"


def fingerprint() -> str:
    """Changes with the files that say what is to be installed."""
    files = (ROOT / "pyproject.toml", ROOT / "constraints.txt")
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def is_current() -> bool:
    """Whether the environment is there and was made for the files as they are now."""
    return (VENV / "bin" / "python").exists() and stamp().exists() and stamp().read_text() == fingerprint()


def torch_outside() -> tuple[Path, str] | None:
    """The folder and version of a torch that this Python has and that is new enough; None without one."""
    if Path(sys.prefix) == VENV:
        return None
    try:
        torch = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    if tuple(int(part) for part in torch.version.split(".")[:2]) < OLDEST_TORCH:
        return None
    # Installed is not yet working: a CUDA library may be missing.
    if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, check=False).returncode:
        return None
    return Path(str(torch.locate_file(""))).resolve(), torch.version


def site_packages() -> Path:
    """Where the environment's packages lie."""
    return VENV / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def pinned_torch(constraints: str) -> str:
    """The version of torch that constraints.txt names."""
    pin = re.search(r"^torch==(\S+)$", constraints, flags=re.MULTILINE)
    if pin is None:
        sys.exit("constraints.txt does not pin torch.")
    return pin.group(1)


def announce(torch: str) -> None:
    """Say how many gigabytes will come, before any does, and how to have fewer."""
    if (site_packages() / "torch").exists():
        print(f"Installing Concord; {VENV} has torch already, up to {OTHERS_GB} GB will be downloaded.", flush=True)
        return
    offered = subprocess.run([*PIP, "index", "versions", "torch"], capture_output=True, text=True, check=False).stdout
    if sys.platform != "linux" or f"{torch}+cpu" in re.split(r"[\s,]+", offered):
        print(
            f"Downloading about {TORCH_CPU_GB} GB for torch {torch} (its build for the CPU) and {OTHERS_GB} GB for the"
            " rest, less what pip has in its cache.",
            flush=True,
        )
        return
    print(
        f"Downloading about {TORCH_CUDA_GB} GB for torch {torch} with the CUDA libraries ({TORCH_CUDA_DISK_GB} GB on"
        f" disk) and {OTHERS_GB} GB for the rest, less what pip has in its cache.\n"
        f"No GPU here? Stop now (Ctrl-C), install torch's build for the CPU ({TORCH_CPU_GB} GB; torch's own page says"
        f" how) into the Python\nthat you use, and run again: make finds it and downloads no other. For another Python"
        f" than {sys.executable}: make PYTHON=...",
        flush=True,
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Stopped; the next make goes on from here.")
