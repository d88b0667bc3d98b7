"""A small student and its teacher in one folder, as `scalingnote distill` publishes them."""

from pathlib import Path

import torch
from torch import nn

import families
from published import HIDDEN, PROMPTS, folder
from scalingnote.models import lookup, published_tower
from scalingnote.models.config import LookupConfig
from scalingnote.models.publish import write_router

NAME = "small-tower"


def router(path: Path) -> Path:
    """A table of random rows for queries, a transformer with a prompt for documents."""
    published = folder(path / "teacher", prompts=PROMPTS, dense=[(HIDDEN, True, nn.Tanh())])
    published_tower.open_published(published, "document").save(path / "document")
    learnt = families.tokenizer().backend_tokenizer
    made = lookup.build(LookupConfig(max_length=64), dim=HIDDEN, tokenizer_json=learnt.to_str(), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in made.parameters():
            value.normal_(0.1, 0.3, generator=generator)
    made.save(path / "query")
    write_router(path / "query", path / "document", path / NAME)
    return path / NAME
