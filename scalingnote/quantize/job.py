"""The quantize stage: codebooks, and semantic IDs for every part of the embeddings.

Tasks draw a sample from the parts, and one task fits the codebooks on it. Or the codebooks come from an
earlier artifact, and its IDs are kept. Actors code the parts and write their IDs, and tasks over ranges of
codes sort them by code (naming.py). A killed run keeps its finished codebooks, parts and ranges. The driver
holds only file names.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float
from numpy import ndarray
from safetensors import numpy as safetensors

from scalingnote.core import cluster
from scalingnote.core.config import Resources
from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.core.log import get_logger
from scalingnote.core.parts import PartStage
from scalingnote.quantize import kmeans, naming, semantic_id
from scalingnote.quantize.config import QuantizeConfig
from scalingnote.quantize.kmeans import SAMPLE_SEED, draw, shares
from scalingnote.storage import filesystem as fs
from scalingnote.storage.arrow import to_arrow, to_numpy
from scalingnote.storage.artifact import Artifact, Draft, Part, open_artifact, read_table, write_table
from scalingnote.storage.schema import INDEXED_VIEW
from scalingnote.storage.shuffle import ROWS_PER_SLICE, group_by_size, run_slices

CODEBOOKS = "codebooks.safetensors"
FITTED = "fitted.safetensors"  # counts of the corpus that the codebooks were fitted for, without the sample
STATISTICS = "statistics.json"
SampledPart = tuple[str, int, int]  # name of a part, its number, and its number of sampled rows
log = get_logger("quantize")


def run(config: QuantizeConfig, *, embeddings: str, output: str) -> Artifact:
    """Assign a semantic ID to every embedding.

    Args:
        config: of the stage. With `codebooks`, documents of that earlier artifact keep their IDs if their
            vectors are the same; `drift` in `statistics.json` describes how the others differ.
        embeddings: URI of the embeddings.
        output: URI of the `semantic_ids` artifact.

    Raises:
        ConfigError: the sample is too small, or settings differ from those of the earlier codebooks.
        ArtifactError: there is no embedding, or the earlier codebooks have another dimension.
    """
    source = open_artifact(embeddings, kind="embeddings")
    parents = {"embeddings": source}
    if config.codebooks is not None:
        parents["codebooks"] = open_artifact(fs.absolute(config.codebooks), kind="semantic_ids")
    draft = Draft(output, kind="semantic_ids", config=config, parents=parents)
    if draft.finished:
        log.info("already finished: %s", output)
        return draft.existing()
    parts = source.names("embeddings/", ".parquet")
    rows = part_rows(source, parts)
    earlier = parents.get("codebooks")
    if earlier is not None:
        _require_fitting(config, earlier, source, parts)
    else:
        kmeans.require_sample(_sample_size(config, rows), codes=config.codes)
    cluster.connect()
    cluster.check_resources(config.resources, knob="quantize.resources")

    draft.write_bytes(CODEBOOKS, _codebooks(config, draft, source, earlier))
    coded = _code(config, parts, rows, draft, source)
    for name, part in coded.items():
        draft.register(name, part)
    shape = {"levels": config.levels, "size": config.codes}
    counted = naming.sort(draft, [*coded], rows, **shape, earlier=earlier, each=cluster.map_tasks)
    report = _report(config, counted, draft, earlier)
    log.info(
        "%s semantic IDs, %s of them share all codes with an earlier one, residual energy %.3f: %s",
        f"{report['documents']:,}",
        f"{report['collisions']:,}",
        report["levels"][-1]["residual_energy"],
        output,
    )
    return draft.commit(counts={name: report[name] for name in ("documents", "collisions")})


def part_rows(artifact: Artifact, parts: Sequence[str]) -> list[int]:
    """Return the number of rows of each table part."""
    return [*artifact.rows_of(parts).values()]


def store_sample(embeddings: Artifact, *, documents: int, seed: int, folder: str, section: str) -> int:
    """Write an even sample of the embeddings to files in `folder`, in tasks; return the number of files."""
    parts = embeddings.names("embeddings/", ".parquet")
    takes = shares(part_rows(embeddings, parts), size=documents, seed=seed)
    sampled = [
        (part, number, take) for number, (part, take) in enumerate(zip(parts, takes, strict=True)) if take
    ]
    groups = group_by_size([take for _, _, take in sampled], limit=ROWS_PER_SLICE)
    files = [[sampled[place] for place in group] for group in groups]
    store = partial(_store_file, source=embeddings, seed=seed, folder=folder)
    each = cluster.map_tasks
    return len(run_slices("sample", store, files, folder=folder, each=each, section=section, unit="files"))


def _store_file(item: tuple[int, list[SampledPart]], *, source: Artifact, seed: int, folder: str) -> int:
    """Write the vectors that are drawn from some parts; return their number."""
    number, sampled = item
    drawn: list[ndarray] = []
    for part, place, take in sampled:
        vectors = read_vectors(source, part)[1]
        drawn.append(np.take(vectors, draw(len(vectors), take=take, seed=seed, part=place), axis=0))
    write_table(_sample_file(folder, number), pa.table({"vector": to_arrow(np.concatenate(drawn))}))
    return sum(map(len, drawn))


def read_sample(folder: str, files: int) -> Float[ndarray, "docs dim"]:
    """Read the vectors that :func:`store_sample` wrote to `files` files."""
    tables = [read_table(_sample_file(folder, number)) for number in range(files)]
    return to_numpy(pa.concat_tables(tables)["vector"])


def _sample_file(folder: str, number: int) -> str:
    return fs.join(folder, "vectors", f"{number:05d}.arrow")


def read_vectors(embeddings: Artifact, part: str) -> tuple[pa.ChunkedArray, Float[ndarray, "docs dim"]]:
    """Read document ids and vectors of an embeddings part; raise ArtifactError if a vector is not finite."""
    table = embeddings.table(part, columns=["doc_id", INDEXED_VIEW])
    vectors = to_numpy(table[INDEXED_VIEW])
    broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(broken):
        first = table["doc_id"][int(broken[0])].as_py()
        raise ArtifactError(
            f"{embeddings.uri}/{part}: {len(broken)} vectors are not finite, first of document {first!r}: "
            "re-run the encode stage"
        )
    return table["doc_id"], vectors


def use_threads(resources: Resources) -> None:
    """Limit faiss to the worker's cores: otherwise it uses all cores of the node."""
    faiss.omp_set_num_threads(max(1, int(resources.cpus_per_worker)))


def _require_fitting(
    config: QuantizeConfig, earlier: Artifact, source: Artifact, parts: Sequence[str]
) -> None:
    """Check that earlier codebooks have the shape and beam of the config, and the embeddings' dimension."""
    levels, codes, dim = safetensors.load(earlier.read_bytes(CODEBOOKS))["codebooks"].shape
    wanted = {"levels": config.levels, "codes": config.codes, "beam": config.beam}
    earlier_settings = {
        "levels": levels,
        "codes": codes,
        "beam": earlier.manifest.config.get("beam", config.beam),
    }
    if wanted != earlier_settings:
        knobs = " ".join(f"quantize.{name}={value}" for name, value in earlier_settings.items())
        raise ConfigError(f"IDs stay only with the settings that made {earlier.uri}: set {knobs}")
    if not parts:
        raise ArtifactError(
            f"{source.uri} has no embedding: every document was set aside, see its rejected.parquet"
        )
    with fs.open_input(fs.join(source.uri, parts[0])) as stream:
        width = pq.read_schema(stream).field(INDEXED_VIEW).type.list_size
    if width != dim:
        raise ArtifactError(
            f"{earlier.uri} has codebooks of {dim} dimensions, {source.uri} embeddings of {width}: "
            "unset quantize.codebooks to fit new ones"
        )


def _sample_size(config: QuantizeConfig, rows: Sequence[int]) -> int:
    """Return the size of the sample.

    A tenth of the corpus or more is left out to compare new documents with, unless a codebook needs it.
    """
    documents = sum(rows)
    return min(config.sample_documents, max(documents - documents // 10, min(config.codes, documents)))


def _codebooks(config: QuantizeConfig, draft: Draft, source: Artifact, earlier: Artifact | None) -> bytes:
    if earlier is not None:
        return earlier.read_bytes(CODEBOOKS)
    if fs.exists(draft.path(CODEBOOKS)):  # fitted before the run was killed
        return fs.read_bytes(draft.path(CODEBOOKS))
    size = _sample_size(config, part_rows(source, source.names("embeddings/", ".parquet")))
    folder = draft.work("fit")
    fit = partial(_fit, config=config, folder=folder)
    files = store_sample(source, documents=size, seed=SAMPLE_SEED, folder=folder, section="quantize")
    (codebooks,) = cluster.map_tasks(fit, [files], config.resources)
    data: bytes = safetensors.save({"codebooks": codebooks})
    return data


def _fit(files: int, *, config: QuantizeConfig, folder: str) -> Float[ndarray, "levels codes dim"]:
    use_threads(config.resources)
    return kmeans.fit(read_sample(folder, files), levels=config.levels, codes=config.codes, seed=SAMPLE_SEED)


def _code(
    config: QuantizeConfig, parts: Sequence[str], rows: Sequence[int], draft: Draft, source: Artifact
) -> dict[str, Part]:
    """Code all parts and write their IDs; return the parts by name."""
    size = 0 if config.codebooks else _sample_size(config, rows)
    takes = shares(rows, size=size, seed=SAMPLE_SEED)
    items = [[part, take] for part, take in zip(parts, takes, strict=True)]
    code = PartStage(partial(_Coder, config, source, draft.path(CODEBOOKS), draft.work(), draft.uri))
    each = partial(cluster.map_loaded, resources=config.resources)
    run = partial(run_slices, folder=draft.work(), each=each, section="quantize", unit="documents", rows=rows)
    records = run("code", code, items)
    return {_codes_part(part): Part(**record) for part, record in zip(parts, records, strict=True)}


class _Coder:
    """Codes parts of the embeddings, in an actor."""

    def __init__(
        self, config: QuantizeConfig, source: Artifact, codebooks: str, work: str, output: str
    ) -> None:
        use_threads(config.resources)
        self._config, self._source, self._work, self._output = config, source, work, output
        self._codebooks = safetensors.load(fs.read_bytes(codebooks))["codebooks"]

    def __call__(self, item: tuple[int, list[Any]]) -> dict[str, Any]:
        """Code a part and write its IDs.

        `item` is the part's number, and its name with the number of its rows that are in the sample.
        """
        number, (part, sampled) = item
        doc_ids, vectors = read_vectors(self._source, part)
        codes = kmeans.encode(vectors, self._codebooks, beam=self._config.beam)
        energy = kmeans.residual_energy(vectors, codes, self._codebooks)
        fitted = np.zeros(len(codes), bool)
        fitted[draw(len(codes), take=sampled, seed=SAMPLE_SEED, part=number)] = True
        table = naming.coded_table(doc_ids, codes, energy, fitted)
        name = _codes_part(part)
        write_table(fs.join(self._work, name), table)
        ids = semantic_id.to_table(table["doc_id"], codes, table["suffix"].to_numpy())
        return asdict(write_table(fs.join(self._output, name), ids))


def _report(
    config: QuantizeConfig, counted: naming.Counted, draft: Draft, earlier: Artifact | None
) -> dict[str, Any]:
    """Write `statistics.json` and return its contents; log the drift if there are earlier codebooks."""
    report = naming.report(counted.all, counted.spread)
    baseline = counted.unseen
    if earlier is not None:
        baseline = safetensors.load(earlier.read_bytes(FITTED))
        report["drift"] = naming.drift(counted.unseen, baseline, refit_above=config.refit_above)
        _log_drift(report["drift"], config)
    draft.write_bytes(FITTED, safetensors.save(baseline))
    draft.write_json(STATISTICS, report)
    return report


def _log_drift(drift: dict[str, Any], config: QuantizeConfig) -> None:
    if not drift["documents"]:
        log.info("every document kept its ID")
        return
    ratio = drift["levels"][-1]["residual_energy_ratio"]
    new = f"{drift['documents']:,} new documents leave over {ratio:.2f} times what the fitted ones do"
    if drift["refit"]:
        log.warning(
            "%s, more than refit_above=%g: fit new codebooks (quantize.codebooks=null); IDs change then",
            new,
            config.refit_above,
        )
    else:
        log.info("%s", new)


def _codes_part(part: str) -> str:
    return "codes/" + part.removeprefix("embeddings/")
