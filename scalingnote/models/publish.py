"""Towers to hand on: each tower of an artifact as a folder of its own, with a model card.

The folder is what the artifact holds, readable by transformers, sentence-transformers and this package. The
card says what the manifests say: base model, data, losses, sizes; and whether clicks were simulated.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalingnote.errors import ArtifactError
from scalingnote.models.card import described_table
from scalingnote.models.layout import BOUNDARY, layout
from scalingnote.storage.artifact import Artifact, Manifest, open_artifact

_PAPER = "ScalingNote (arXiv 2411.15766)"
_TAUGHT = {
    "qkd": "squared distance and cosine (weight {cosine}) to the teacher's query embeddings",
    "cosine": "1 - cosine to the teacher's query embeddings",
    "query_matching": "distance to the teacher's query embeddings",
    "document_matching": "distance to the teacher's document embeddings",
    "one_hot": "cross entropy of labels",
    "scores": "cross entropy with the teacher's scores",
}


def publish(artifact: Artifact, folder: Path, *, metrics: Mapping[str, float] | None = None) -> list[Path]:
    """Copy every tower of a dual encoder, or a student, below `folder`; returns their folders.

    `metrics`, if known, are printed in the cards. ArtifactError when `artifact` holds no tower.
    """
    names = [name.split("/")[0] for name in artifact.names(suffix="/tower.json")]
    if not names:
        raise ArtifactError(f"{artifact.uri} ({artifact.manifest.kind}) holds no tower to publish")
    for name in names:
        shutil.copytree(artifact.directory(name), folder / name, dirs_exist_ok=True)
        facts = json.loads((folder / name / "tower.json").read_text())
        facts["whole"] = (folder / name / "modules.json").exists()
        card = model_card(artifact.manifest, facts, ancestors=_ancestors(artifact), metrics=metrics)
        (folder / name / "README.md").write_text(card)
    return [folder / name for name in names]


def model_card(
    manifest: Manifest,
    facts: Mapping[str, Any],
    *,
    ancestors: Mapping[str, Manifest],
    metrics: Mapping[str, float] | None = None,
) -> str:
    """Markdown of one tower: `facts` is its tower.json, `ancestors` are manifests by kind, those found."""
    config, role = manifest.config, facts["role"]
    if "losses" not in config:
        return _adopted_card(manifest, facts)
    settings = config["student" if "student" in config and role == "query" else role]
    if settings.get("kind") == "token_wise" and settings["backbone"] is None:
        settings = {**settings, **{name: config["document"][name] for name in ("backbone", "lora")}}
    stage = "distilled from a teacher query tower" if "student" in config else "contrastive, both towers"
    created = manifest.info.get("created", "at an unknown time")
    dataset = ancestors.get("dataset")
    table = facts.get("kind") == "lookup"
    others = "" if table else "sentence-transformers, "
    lines = [
        "---",
        *([] if table else ["library_name: sentence-transformers"]),
        "pipeline_tag: sentence-similarity",
        *_base_line(settings.get("backbone")),
        f"tags: [{others}feature-extraction, dense-retrieval, scalingnote]",
        "---",
        f"# {role.capitalize()} tower, {facts['dim']} dimensions",
        "",
        f"One side of a dual encoder trained with ScalingNote, after {_PAPER}. Its embeddings are not "
        "normalised; compare them by cosine. "
        f"{'Queries' if role == 'query' else 'Documents'} are read up to {facts['max_length']} tokens.",
        "",
        "## Use",
        "",
        *_use(facts),
        "",
        "## Training",
        "",
        f"- Stage: {stage}",
        f"- Backbone: {_backbone(settings) if 'backbone' in settings else 'none'}",
        *([f"- Table: {described_table(facts)}"] if table else []),
        f"- Losses: {_losses(config)}",
        f"- Batch {config['global_batch']}, {config['epochs']:g} epochs, peak learning rate "
        f"{config['optimizer']['peak_lr']:g}, seed {config['seed']}",
        f"- Data: {', '.join(f'{count:,} {name}' for name, count in manifest.counts.items())}",
    ]
    if dataset is not None:
        about = dataset.info.get("description") or dataset.config.get("name") or "see the dataset artifact"
        lines += [f"- Dataset: {about} (licence: {dataset.info.get('licence') or 'not stated'})"]
        clicks = "simulated from judged data" if dataset.info.get("simulated_clicks") else "as logged"
        lines += [f"- Clicks: {clicks}"]
    else:
        lines += ["- Dataset: its artifact was not there when this card was written"]
    if metrics:
        lines += ["", "## Measured", "", "| measure | value |", "|---|---|"]
        lines += [f"| {name} | {value:.4f} |" for name, value in metrics.items()]
    lines += [
        "",
        f"Artifact digest `{manifest.digest[:16]}`, built {created}.",
    ]
    return "\n".join(lines) + "\n"


def _adopted_card(manifest: Manifest, facts: Mapping[str, Any]) -> str:
    """Markdown of a published model's tower, which nothing was trained of."""
    role, config = facts["role"], manifest.config
    path = config.get("query_path") or config["path"] if role == "query" else config["path"]
    example = '["how to join two tensors"]' if role == "query" else '["Title Text of the document"]'
    weights = manifest.info.get("weights_sha256", {}).get(role, {})
    read = "Queries are" if role == "query" else "Documents are"
    created = manifest.info.get("created", "at an unknown time")
    lines = [
        "---",
        "library_name: sentence-transformers",
        "pipeline_tag: sentence-similarity",
        f"base_model: {json.dumps(path)}",
        "tags: [sentence-transformers, feature-extraction, dense-retrieval, scalingnote]",
        "---",
        f"# {role.capitalize()} tower, {facts['dim']} dimensions",
        "",
        f"`{path}` as published: ScalingNote trained nothing of it. "
        f"{read} read up to {facts['max_length']} tokens, behind "
        f"the prompt {json.dumps(facts['prompt'], ensure_ascii=False)}.",
        "",
        "## Use",
        "",
        "```python",
        "from sentence_transformers import SentenceTransformer",
        "",
        "model = SentenceTransformer(PATH)",
        f"model.encode_{role}({example})",
        "```",
        "",
        *(f"- `{name}`: sha256 `{digest}`" for name, digest in weights.items()),
        "",
        f"Artifact digest `{manifest.digest[:16]}`, built {created}.",
    ]
    return "\n".join(lines) + "\n"


def _use(facts: Mapping[str, Any]) -> list[str]:
    query = facts["role"] == "query"
    if facts.get("kind") == "lookup":
        return [
            "A query is the mean of its tokens' rows; no model is run:",
            "",
            "```python",
            "from pathlib import Path",
            "from scalingnote.encode.query_encoder import QueryEncoder",
            "",
            'QueryEncoder.load(Path(PATH)).encode_queries(["how to join two tensors"])',
            "```",
        ]
    if not facts.get("whole", True):
        method = 'encode_queries(["..."])' if query else "encode_documents(table)"
        return [
            "This folder holds an adapter and the path of its backbone; this package loads both:",
            "",
            "```python",
            "from pathlib import Path",
            "from scalingnote.encode.encoder import Encoder",
            "",
            f"Encoder.load(Path(PATH)).{method}",
            "```",
        ]
    code = ["from sentence_transformers import SentenceTransformer", "", "model = SentenceTransformer(PATH)"]
    if query:
        return ["```python", *code, 'model.encode(["how to join two tensors"])', "```"]
    if facts.get("kind") == "native":
        return ["```python", *code, 'model.encode_document(["Title Text of the document"])', "```"]
    written = json.dumps(layout(facts["prompt"], causal=facts["causal"]), ensure_ascii=False)
    return [
        "```python",
        *code,
        f"LAYOUT = {written}",
        'model.encode([LAYOUT.format(title="Title", topic="", content="Text of the document")])',
        "```",
        "",
        f"`{BOUNDARY}` keeps the parts of the prompt apart and is not read; the rest of the prompt is added "
        "by the tokenizer. The embedding is that of the indexed view; others need this package's `Encoder`. "
        "A title that leaves the prompt no room is cut here, and never by `Encoder`.",
    ]


def _base_line(backbone: Mapping[str, Any] | None) -> list[str]:
    pretrained = backbone is not None and backbone["kind"] == "pretrained"
    return [f"base_model: {json.dumps(backbone['path'])}"] if backbone and pretrained else []


def _backbone(tower: Mapping[str, Any]) -> str:
    backbone, lora = tower["backbone"], tower.get("lora")
    if backbone["kind"] == "pretrained":
        cut = f", first {backbone['layers']} layers" if backbone.get("layers") else ""
        named = f"{backbone['path']}{cut}"
    else:
        sizes = f"{backbone['layers']} layers of {backbone['hidden']}"
        named = f"{backbone['architecture']} from scratch, {sizes}"
    if lora is None:
        return f"{named}, all weights trained"
    return f"{named}, {'DoRA' if lora['dora'] else 'LoRA'} of rank {lora['rank']}, alpha {lora['alpha']:g}"


def _losses(config: Mapping[str, Any]) -> str:
    if "student" in config:
        weights = {name: weight for name, weight in config["losses"].items() if name in _TAUGHT and weight}
        named = [f"{weight:g} x {_TAUGHT[name]}" for name, weight in weights.items()]
        return " + ".join(named).format(cosine=f"{config['losses']['cosine_weight']:g}")
    losses = config["losses"]
    return (
        f"contrastive (temperature {losses['temperature']:g}, {losses['denominator'].replace('_', ' ')}) "
        f"+ {losses['alpha']:g} x margin ({losses['margin']:g}), "
        f"Matryoshka prefixes {', '.join(map(str, losses['matryoshka']))}{_beside(config)}"
    )


def _beside(config: Mapping[str, Any]) -> str:
    """What LightRetriever adds; cards of older artifacts have none of it."""
    sparse, align = config.get("sparse"), config.get("align")
    terms = f"; term weights: contrastive (temperature {sparse['temperature']:g})" if sparse else ""
    flops = f" + {sparse['flops']:g} x FLOPs regulariser" if sparse else ""
    return terms + flops + (f"; {align['weight']:g} x KL to the whole query's scores" if align else "")


def _ancestors(artifact: Artifact) -> dict[str, Manifest]:
    """Manifests of all that `artifact` rests on, by kind; the nearest where there are several."""
    found: dict[str, Manifest] = {}
    waiting = [artifact]
    while waiting:
        for kind, parent in waiting.pop(0).manifest.parents.items():
            try:
                opened = open_artifact(parent["uri"], kind=kind)
            except ArtifactError:
                continue
            if opened.digest == parent["digest"] and kind not in found:
                found[kind] = opened.manifest
                waiting.append(opened)
    return found
