"""No file that is read may run code: these tests search the package for calls that would allow it."""

import ast
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModel

import families
import scalingnote
from scalingnote.core.errors import ConfigError
from scalingnote.models import backbone

ROOT = Path(scalingnote.__file__).parents[1]
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
BETWEEN_WORKERS = {
    "scalingnote/core/ray_data.py",  # of one stage: parts and their results between driver and workers
    "scalingnote/serve/fan_out.py",  # of one application: queries and answers between gateway and searchers
    "scalingnote/serve/index_searcher.py",  # the same
}
NO_WEIGHTS = {"AutoTokenizer", "AutoConfig", "PreTrainedTokenizerFast"}
CHECKED_FIRST = {"PeftModel"}  # has no use_safetensors: see the last test
READERS = {
    "urlopen": {
        "scalingnote/serve/telemetry.py",
        "scalingnote/integrations/client.py",  # JSON of a server that the caller sets
        "scalingnote/encode/endpoint_client.py",  # the same
    },
    "urlretrieve": set[str](),
}

SOURCES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text())
    for room in ("scalingnote", "serve", "jobs")
    for path in sorted((ROOT / room).rglob("*.py"))
}


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """Return the file, the called name and the node of every call."""
    return [
        (name, ast.unparse(node.func), node)
        for name, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]


def given(call: ast.Call, name: str) -> str:
    """Return the source of an argument; empty if it is left out."""
    return next((ast.unparse(each.value) for each in call.keywords if each.arg == name), "")


def imports(tree: ast.Module) -> set[str]:
    modules = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {(node.module or "").partition(".")[0], *(alias.name for alias in node.names)}
    return modules


def test_no_pickle_is_read():
    assert {name for name, tree in SOURCES.items() if imports(tree) & PICKLES} <= BETWEEN_WORKERS
    for name, called, call in calls():
        assert given(call, "allow_pickle") in ("", "False"), name
        assert given(call, "weights_only") in ("", "True"), name
        assert called != "torch.load" or given(call, "weights_only") == "True", name


def test_models_run_no_code_and_weights_are_safetensors():
    loaders = set()
    for name, called, call in calls():
        assert given(call, "trust_remote_code") in ("", "False"), name
        owner, _, method = called.rpartition(".")
        if method == "from_pretrained" and not any(each in owner for each in NO_WEIGHTS | CHECKED_FIRST):
            loaders.add(called)
            assert given(call, "use_safetensors") == "True", f"{name}: {called}"
        if called in ("SentenceTransformer", "sentence_transformers.CrossEncoder"):
            loaders.add(called)
            assert "'use_safetensors': True" in given(call, "model_kwargs"), f"{name}: {called}"
    assert len(loaders) == 4  # otherwise a call has a form that this test does not find


def test_only_known_modules_download_files():
    for name, called, _ in calls():
        method = called.rpartition(".")[2]
        assert method not in READERS or name in READERS[method], f"{name}: {called}"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return families.folder(tmp_path / "model", "bert")


def as_pickle(path: Path, pickled: str) -> None:
    torch.save(load_file(path), path.with_name(pickled))
    path.unlink()


def test_a_pickled_checkpoint_is_an_error(checkpoint: Path):
    assert backbone.load(checkpoint)
    as_pickle(checkpoint / "model.safetensors", "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"cannot load a backbone .*model\.safetensors"):
        backbone.load(checkpoint)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft 0.21
def test_a_pickled_adapter_is_an_error(checkpoint: Path, tmp_path: Path):
    base = AutoModel.from_pretrained(checkpoint, add_pooling_layer=False)
    adapter = tmp_path / "adapter"
    get_peft_model(base, LoraConfig(target_modules=["query"])).save_pretrained(adapter)
    assert backbone.load(adapter)
    as_pickle(adapter / "adapter_model.safetensors", "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors: .* pickles are not read"):
        backbone.load(adapter)
