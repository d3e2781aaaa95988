"""Checkpoints in the hub's layout load; those that cannot be trusted or do not fit are refused, with the reason."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.model.golden import TOLERANCE, recorded, reference, scored, write_checkpoint, write_json
from worker.errors import CheckpointRefused
from worker.model.checkpoint import MANIFEST, load, network_state, sha256
from worker.model.config import Configuration, OFAConfig
from worker.model.ofa import image_buckets, token_buckets

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "ofa_mini")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = torch.load(folder / "pytorch_model.bin", weights_only=True)
    return weights


def change(folder: Path, file: str, **values: Any) -> None:
    """Set keys of a JSON file; a key of configuration.json's `model` is meant unless the file has it at its top."""
    path = folder / file
    content = json.loads(path.read_text(encoding="utf-8"))
    for key, value in values.items():
        (content["model"] if file == "configuration.json" and key not in content else content)[key] = value
    write_json(path, content)


def write_manifest(folder: Path, **values: Any) -> None:
    files = {path.name: sha256(path) for path in folder.iterdir()}
    write_json(folder / MANIFEST, {"format": 1, "files": files, **values})


def test_a_hub_checkpoint_loads_folded_in_float32(folder: Path) -> None:
    checkpoint = load(folder)

    assert {parameter.dtype for parameter in checkpoint.model.parameters()} == {torch.float32}
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in checkpoint.model.modules())
    assert not checkpoint.model.training
    assert checkpoint.model.encoder.embed_tokens is checkpoint.model.decoder.embed_tokens
    assert checkpoint.answers.names == ("yes", "no", "maybe")
    assert checkpoint.labels == ("entailment", "contradiction", "neutral")
    assert checkpoint.configuration.patch_image_size == 96
    assert checkpoint.sha256 == sha256(folder / "pytorch_model.bin")
    assert (checkpoint.name, checkpoint.revision, checkpoint.recipe) == ("ofa_mini", "", "none")


def test_a_manifest_names_the_model(folder: Path) -> None:
    write_manifest(folder, name="owner/model", revision="v1.0.1", recipe="other")

    checkpoint = load(folder)

    assert (checkpoint.name, checkpoint.revision, checkpoint.recipe) == ("owner/model", "v1.0.1", "other")


def test_safetensors_are_taken_before_the_pickled_file(folder: Path) -> None:
    safetensors.torch.save_file(weights_of(folder), folder / "model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"not read")

    checkpoint = load(folder)

    cases = recorded("plain")["cases"][:4]
    assert checkpoint.sha256 == sha256(folder / "model.safetensors")
    torch.testing.assert_close(scored(checkpoint, cases).probs, reference(cases, "probs"), atol=TOLERANCE, rtol=0)


def test_weights_in_torchs_old_file_format_load(folder: Path) -> None:
    torch.save(weights_of(folder), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)

    assert load(folder).name == "ofa_mini"


def with_everything_a_hub_checkpoint_carries(folder: Path) -> dict[str, torch.Tensor]:
    """The state_dict as ModelScope saves it: buffers, counters, and the shared table under all its names."""
    weights = weights_of(folder)
    config = OFAConfig.from_hub(json.loads((folder / "config.json").read_text()))
    side = config.image_bucket_size
    last = (2 * side - 1) ** 2 + 2
    images = torch.full((side**2 + 1, side**2 + 1), last - 1)
    images[0] = last - 2
    images[0, 0] = last
    images[1:, 1:] = image_buckets(side, side, side, CPU)
    for part in ("encoder", "decoder"):
        weights[f"{part}.token_rp_bucket"] = token_buckets(1024, config.token_bucket_size, CPU)
        weights[f"{part}.image_rp_bucket"] = images
    weights["decoder.image_position_idx"] = torch.zeros(1 + 256 + 768, dtype=torch.long)
    weights["decoder.output_projection.weight"] = weights["encoder.embed_tokens.weight"]
    for name in [name for name in weights if name.endswith("running_mean")]:
        weights[name.replace("running_mean", "num_batches_tracked")] = torch.tensor(7)
    return weights


def test_the_buffers_and_tied_weights_of_a_real_checkpoint_change_nothing(folder: Path) -> None:
    plain = load(folder)
    torch.save(with_everything_a_hub_checkpoint_carries(folder), folder / "pytorch_model.bin")

    full = load(folder)

    cases = recorded("plain")["cases"]
    assert torch.equal(scored(full, cases).log_probs, scored(plain, cases).log_probs)


def test_the_shared_table_may_stand_under_the_decoders_name_alone(folder: Path) -> None:
    weights = weights_of(folder)
    del weights["encoder.embed_tokens.weight"]
    torch.save(weights, folder / "pytorch_model.bin")

    assert load(folder).name == "ofa_mini"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("encoder.token_rp_bucket", "encoder.token_rp_bucket differs from what config.json's bucket sizes give"),
        ("decoder.image_rp_bucket", "decoder.image_rp_bucket differs from what config.json's bucket sizes give"),
        ("decoder.output_projection.weight", "decoder.output_projection.weight differs from encoder.embed_tokens"),
    ],
)
def test_a_buffer_or_tied_weight_that_disagrees_is_refused(folder: Path, name: str, sentence: str) -> None:
    weights = with_everything_a_hub_checkpoint_carries(folder)
    weights[name] = weights[name].clone()
    weights[name][5, 6] += 1
    torch.save(weights, folder / "pytorch_model.bin")

    with pytest.raises(CheckpointRefused, match=sentence):
        load(folder)


def drop(weights: dict[str, Any]) -> None:
    del weights["decoder.layers.1.fc1.bias"]


def add(weights: dict[str, Any]) -> None:
    weights["encoder.layers.2.fc1.bias"] = torch.zeros(128)


def reshape(weights: dict[str, Any]) -> None:
    weights["encoder.layers.0.fc1.bias"] = torch.zeros(64)


def make_infinite(weights: dict[str, Any]) -> None:
    weights["encoder.layers.0.fc1.bias"][3] = torch.inf


def make_integers(weights: dict[str, Any]) -> None:
    weights["encoder.layers.0.fc1.bias"] = torch.zeros(128, dtype=torch.long)


def nest(weights: dict[str, Any]) -> None:
    weights["epoch"] = {"step": 3}


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (drop, r"lack 1 keys .* such as decoder\.layers\.1\.fc1\.bias"),
        (add, r"unknown key, encoder\.layers\.2\.fc1\.bias"),
        (reshape, r"encoder\.layers\.0\.fc1\.bias has the shape \(64,\) where config.json calls for \(128,\)"),
        (make_infinite, r"encoder\.layers\.0\.fc1\.bias holds values that are not finite"),
        (make_integers, r"encoder\.layers\.0\.fc1\.bias holds values that are not finite"),
        (nest, "pytorch_model.bin is not a plain state_dict"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    folder: Path, spoil: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    weights = weights_of(folder)
    spoil(weights)
    torch.save(weights, folder / "pytorch_model.bin")

    with pytest.raises(CheckpointRefused, match=sentence):
        load(folder)


class Payload:
    """What a malicious pickle does when it is read without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(folder: Path, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    torch.save({"weights": Payload(touched)}, folder / "pytorch_model.bin")

    with pytest.raises(CheckpointRefused, match=r"pytorch_model\.bin holds more than tensors"):
        load(folder)
    assert not touched.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_truncated_weights_file_is_refused(folder: Path, name: str) -> None:
    safetensors.torch.save_file(weights_of(folder), folder / "model.safetensors")
    whole = (folder / name).read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(whole[: len(whole) // 2])

    with pytest.raises(CheckpointRefused, match=rf"{name} (cannot be read as weights|holds more than tensors)"):
        load(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "configuration.json", "vocab.json", "merges.txt", "ans2label.json", "pytorch_model.bin"]
)
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    missing = "model.safetensors" if name == "pytorch_model.bin" else name

    with pytest.raises(CheckpointRefused, match=f"{missing} is missing in .*ofa_mini"):
        load(folder)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointRefused, match=r"There is no directory .*nowhere"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "vocab.json", "concord.json"])
def test_a_link_out_of_the_directory_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b'{"format": 1}')
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)

    with pytest.raises(CheckpointRefused, match=f"{name} leads out of .*ofa_mini"):
        load(folder)


def test_a_link_within_the_directory_is_followed(folder: Path) -> None:
    os.rename(folder / "vocab.json", folder / "the_vocabulary.json")
    (folder / "vocab.json").symlink_to("the_vocabulary.json")

    assert load(folder).name == "ofa_mini"


def test_an_answers_file_out_of_the_directory_is_refused(folder: Path, tmp_path: Path) -> None:
    write_json(tmp_path / "answers.json", {"yes": 0, "no": 1})
    change(folder, "configuration.json", answer2label="../answers.json")

    with pytest.raises(CheckpointRefused, match=r"answers\.json leads out of"):
        load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "config.json", "merges.txt", "ans2label.json"])
def test_a_file_with_another_hash_than_the_manifests_is_refused(folder: Path, name: str) -> None:
    write_manifest(folder)
    with (folder / name).open("ab") as file:
        file.write(b"\n")

    with pytest.raises(CheckpointRefused, match=f"{name} has sha256 [0-9a-f]{{64}} and concord.json says"):
        load(folder)


def test_a_file_that_the_manifest_does_not_list_is_refused(folder: Path) -> None:
    write_manifest(folder)
    safetensors.torch.save_file(weights_of(folder), folder / "model.safetensors")

    with pytest.raises(CheckpointRefused, match=r"model\.safetensors is not among the files of concord\.json"):
        load(folder)


@pytest.mark.parametrize(
    ("manifest", "sentence"),
    [
        ({"format": 2}, "concord.json has format 2"),
        ({"format": 1, "name": 5}, "concord.json has name = 5"),
        ({"format": 1, "files": ["a"]}, "concord.json has files that are not an object"),
        ({"format": 1, "labels": {"yes": 1}}, "concord.json has labels that are not an object"),
        (["format"], "concord.json is not a JSON object"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_refused(folder: Path, manifest: object, sentence: str) -> None:
    write_json(folder / MANIFEST, manifest)

    with pytest.raises(CheckpointRefused, match=sentence):
        load(folder)


@pytest.mark.parametrize(
    ("file", "values", "sentence"),
    [
        ("config.json", {"use_ofasys": True}, "use_ofasys = True"),
        ("config.json", {"normformer": False}, "normformer = False"),
        ("config.json", {"entangle_position_embedding": True}, "entangle_position_embedding = True"),
        ("config.json", {"layernorm_embedding": False}, "layernorm_embedding = False"),
        ("config.json", {"activation_function": "relu"}, "activation_function = 'relu'"),
        ("config.json", {"share_attn_bias": True}, "share_attn_bias = True"),
        ("config.json", {"scale_embedding": True}, "scale_embedding = True"),
        ("config.json", {"resnet_type": "resnet200"}, "resnet_type = 'resnet200'"),
        ("config.json", {"model_type": "bart"}, "model_type = 'bart'"),
        ("config.json", {"encoder_attention_heads": 5}, "encoder_attention_heads = 5, which does not divide"),
        ("config.json", {"d_model": "64"}, "d_model = '64', which is not of type int"),
        ("config.json", {"max_position_embeddings": 2048}, "max_position_embeddings = 2048"),
        ("config.json", {"auto_map": {"AutoModel": "code.Model"}}, "config.json asks to run code"),
        ("config.json", {"bos_token_id": 2}, "vocab.json has <s>, <pad>, </s> at"),
        ("config.json", {"vocab_size": 300}, "vocab.json has 461 tokens, config.json only vocab_size = 300"),
        ("config.json", {"eos_token_id": 99_999}, "eos_token_id = 99999, outside the vocabulary"),
        ("configuration.json", {"patch_image_size": 688}, r"patch_image_size = 688, a grid of 43 x 43.*image_bucket"),
        ("configuration.json", {"max_src_length": 255}, "prompts of 257 tokens.*lower max_src_length"),
        ("configuration.json", {"max_src_length": 0}, "max_src_length = 0"),
        ("configuration.json", {"task": "image-captioning"}, "task = 'image-captioning'"),
        ("configuration.json", {"type": "mplug"}, "model.type = 'mplug'"),
        ("configuration.json", {"multimodal_type": "mmspeech"}, "model.multimodal_type = 'mmspeech'"),
        ("configuration.json", {"language": "zh"}, "model.language = 'zh'"),
        ("configuration.json", {"prompt_type": "none"}, "model.prompt_type = 'none'"),
        ("configuration.json", {"prompt_type": "src"}, "model.prompt_type = 'src'"),
        ("configuration.json", {"plugins": ["some-package"]}, "configuration.json asks to run code"),
        ("configuration.json", {"allow_remote": True}, "configuration.json asks to run code"),
        ("configuration.json", {"prompt": "is {0.__class__}?"}, r"prompt = 'is {0\.__class__}\?'"),
        ("configuration.json", {"prompt": "no place"}, "prompt = 'no place'; it must hold"),
        ("configuration.json", {"prompt": "broken {"}, "prompt = 'broken {'; it must hold"),
        ("configuration.json", {"answer2label": ""}, "names no answers: set model.answer2label"),
        ("configuration.json", {"model": []}, 'configuration.json has no object "model"'),
    ],
)
def test_settings_that_are_not_computed_are_refused(
    folder: Path, file: str, values: dict[str, Any], sentence: str
) -> None:
    change(folder, file, **values)

    with pytest.raises(CheckpointRefused, match=sentence):
        load(folder)


def test_a_pickled_answers_file_is_passed_over_for_its_json_twin(folder: Path) -> None:
    (folder / "ans2label.pkl").write_bytes(b"not opened")
    change(folder, "configuration.json", answer2label="ans2label.pkl")

    assert load(folder).answers.names == ("yes", "no", "maybe")


def test_a_pickled_answers_file_is_never_opened(folder: Path, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    (folder / "others.pkl").write_bytes(pickle.dumps(Payload(touched)))
    change(folder, "configuration.json", answer2label="others.pkl")

    with pytest.raises(CheckpointRefused, match=r"write its contents to others\.json"):
        load(folder)
    assert not touched.exists()


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        ({"yes": 0}, "ans2label.json is not an object of at least two answers"),
        ({"yes": "0", "no": "1"}, "ans2label.json is not an object of at least two answers"),
        ({" ": 0, "no": 1}, "ans2label.json is not an object of at least two answers"),
        (["yes", "no"], "ans2label.json is not a JSON object"),
        ({"yes": 0, "no": 1, "perhaps": 2}, "not known what the answer 'perhaps' means.*concord.json"),
        ({"yes": 0, "no": 1, "false": 2}, "Two answers mean contradiction"),
        ({"yes": 0, "maybe": 1}, "No answer means contradiction"),
    ],
)
def test_answers_that_cannot_be_told_are_refused(folder: Path, answers: object, sentence: str) -> None:
    write_json(folder / "ans2label.json", answers)

    with pytest.raises(CheckpointRefused, match=sentence):
        load(folder)


def test_the_manifest_gives_meaning_to_an_unknown_answer(folder: Path) -> None:
    write_json(folder / "ans2label.json", {"perhaps": 0, "no": 1, "certainly": 2})
    write_manifest(folder, labels={"perhaps": "neutral", "certainly": "entailment"})

    assert load(folder).labels == ("neutral", "contradiction", "entailment")


def test_a_label_that_is_none_is_refused(folder: Path) -> None:
    write_manifest(folder, labels={"maybe": "unsure"})

    with pytest.raises(CheckpointRefused, match="one of entailment, contradiction, neutral"):
        load(folder)


def test_a_checkpoint_without_a_word_for_neutral_loads(folder: Path) -> None:
    write_json(folder / "ans2label.json", {"yes": 0, "no": 1})

    assert load(folder).labels == ("entailment", "contradiction")


def test_a_file_that_is_not_json_is_refused(folder: Path) -> None:
    (folder / "vocab.json").write_text("{")

    with pytest.raises(CheckpointRefused, match=r"vocab\.json is not JSON"):
        load(folder)


def test_a_file_that_is_not_text_is_refused(folder: Path) -> None:
    (folder / "merges.txt").write_bytes(b"\xff\xfe\xff")

    with pytest.raises(CheckpointRefused, match=r"merges\.txt is not UTF-8"):
        load(folder)


def test_a_prompt_of_the_checkpoints_own_is_used(folder: Path) -> None:
    change(folder, "configuration.json", prompt=" is it true that {} ?")
    assert load(folder).configuration.plain_prompt == " is it true that {} ?"

    change(folder, "configuration.json", prompt=" does {} imply {} ?")
    assert load(folder).configuration.premise_prompt == " does {} imply {} ?"


def test_a_network_configuration_reads_back_as_written() -> None:
    config = OFAConfig(d_model=128, encoder_layers=3, resnet_type="resnet18")

    assert OFAConfig.from_hub(config.to_hub()) == config


def test_the_hubs_defaults_stand_where_a_file_is_silent() -> None:
    config = OFAConfig.from_hub({})
    model = {"type": "ofa", "prompt_type": "prev_output"}
    configuration = Configuration.from_hub({"task": "visual-entailment", "model": model})

    assert (config.vocab_size, config.d_model, config.resnet_type) == (59457, 512, "resnet101")
    assert (configuration.max_src_length, configuration.patch_image_size) == (256, 480)
    assert configuration.plain_prompt == ' does the image describe " {} "?'


def test_a_networks_state_holds_each_table_once(folder: Path) -> None:
    config = OFAConfig.from_hub(json.loads((folder / "config.json").read_text()))

    state = network_state(with_everything_a_hub_checkpoint_carries(folder), config, longest_text=80)

    assert "encoder.embed_tokens.weight" in state
    assert not [name for name in state if "bucket" in name or "output_projection" in name or "tracked" in name]
    assert "decoder.embed_tokens.weight" not in state
