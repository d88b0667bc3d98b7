"""No file that is read may run code: the package is searched for calls that would let it."""

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
    "scalingnote/core/ray_data.py",  # of one stage: parts and their results on their way to workers and back
    "scalingnote/serve/fan_out.py",  # of one application: queries on their way to searchers, and answers back
    "scalingnote/serve/index_searcher.py",  # the same
}
NO_WEIGHTS = {"AutoTokenizer", "AutoConfig", "PreTrainedTokenizerFast"}
CHECKED_FIRST = {"PeftModel"}  # takes no use_safetensors: see the last test
READERS = {
    "urlopen": {
        "scalingnote/serve/telemetry.py",
        "scalingnote/integrations/client.py",  # JSON of a server that the caller names
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
    """The file, what is called, and the call."""
    return [
        (name, ast.unparse(node.func), node)
        for name, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]


def given(call: ast.Call, name: str) -> str:
    """An argument as it is written; empty where it is left out."""
    return next((ast.unparse(each.value) for each in call.keywords if each.arg == name), "")


def imports(tree: ast.Module) -> set[str]:
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").partition(".")[0], *(alias.name for alias in node.names)}
    return found


def test_no_pickle_is_read():
    assert {name for name, tree in SOURCES.items() if imports(tree) & PICKLES} <= BETWEEN_WORKERS
    for name, called, call in calls():
        assert given(call, "allow_pickle") in ("", "False"), name
        assert given(call, "weights_only") in ("", "True"), name
        assert called != "torch.load" or given(call, "weights_only") == "True", name


def test_no_code_of_a_model_runs_and_weights_are_safetensors():
    seen = set()
    for name, called, call in calls():
        assert given(call, "trust_remote_code") in ("", "False"), name
        owner, _, method = called.rpartition(".")
        if method == "from_pretrained" and not any(each in owner for each in NO_WEIGHTS | CHECKED_FIRST):
            seen.add(called)
            assert given(call, "use_safetensors") == "True", f"{name}: {called}"
        if called in ("SentenceTransformer", "sentence_transformers.CrossEncoder"):
            seen.add(called)
            assert "'use_safetensors': True" in given(call, "model_kwargs"), f"{name}: {called}"
    assert len(seen) == 4  # or a call is written in a way that is not found here


def test_files_are_downloaded_in_known_places_only():
    for name, called, _ in calls():
        method = called.rpartition(".")[2]
        assert method not in READERS or name in READERS[method], f"{name}: {called}"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return families.folder(tmp_path / "model", "bert")


def as_pickle(path: Path, pickled: str) -> None:
    torch.save(load_file(path), path.with_name(pickled))
    path.unlink()


def test_a_checkpoint_that_is_a_pickle_is_refused(checkpoint: Path):
    assert backbone.load(checkpoint)
    as_pickle(checkpoint / "model.safetensors", "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"cannot load a backbone .*model\.safetensors"):
        backbone.load(checkpoint)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft 0.21
def test_an_adapter_that_is_a_pickle_is_refused(checkpoint: Path, tmp_path: Path):
    base = AutoModel.from_pretrained(checkpoint, add_pooling_layer=False)
    adapter = tmp_path / "adapter"
    get_peft_model(base, LoraConfig(target_modules=["query"])).save_pretrained(adapter)
    assert backbone.load(adapter)
    as_pickle(adapter / "adapter_model.safetensors", "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors: .* pickles are not read"):
        backbone.load(adapter)
