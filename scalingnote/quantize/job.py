"""The quantize stage: codebooks, and semantic IDs for every part of the embeddings.

Tasks draw a sample from the parts. Codebooks are fitted on it in one task, or by Lloyd passes of many if it
exceeds a worker (kmeans.fit_files); or they come from an earlier artifact, whose IDs then stay. Actors code
the parts, and tasks over ranges of codes assign the IDs (naming.py). A kill loses no finished codebooks,
passes, parts or ranges. The driver only holds file names.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from jaxtyping import Float
from numpy import ndarray
from safetensors import numpy as safetensors

from scalingnote import cluster
from scalingnote.config import Resources
from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.log import get_logger
from scalingnote.quantize import kmeans, naming, semantic_id
from scalingnote.quantize.config import QuantizeConfig
from scalingnote.quantize.kmeans import draw, shares
from scalingnote.storage import filesystem as fs
from scalingnote.storage.arrow import to_numpy
from scalingnote.storage.artifact import Artifact, Draft, open_artifact, write_table
from scalingnote.storage.shuffle import ROWS_PER_SLICE, group_by_size, run_slices

VIEW = "summary"  # the embedding that is quantized and indexed
CODEBOOKS = "codebooks.safetensors"
FITTED = "fitted.safetensors"  # tally of the corpus that the codebooks were fitted for, without the sample
STATISTICS = "statistics.json"
SAMPLE_TASKS = 512  # at most: each is an object that the joining task must fetch
SampledPart = tuple[str, int, int]  # name of a part, its number, and its number of sampled rows
log = get_logger("quantize")


def run(config: QuantizeConfig, *, embeddings: str, output: str) -> Artifact:
    """Assign a semantic ID to every embedding.

    Args:
        config: of the stage. With `codebooks`, documents of that earlier artifact keep their IDs if their
            codes are the same; `drift` in `statistics.json` describes how the others differ.
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
        sampled = min(_sample_size(config, rows), config.documents_per_worker)
        kmeans.require_sample(sampled, codes=config.codes)
    cluster.connect()
    cluster.check_resources(config.resources, knob="quantize.resources")

    draft.write_bytes(CODEBOOKS, _codebooks(config, draft, source, earlier))
    _code(config, parts, rows, draft, source)
    corpus = naming.CodedCorpus(
        output=draft.uri, work=draft.work(), levels=config.levels, size=config.codes, given=earlier
    )
    named = naming.name(corpus, [_codes_part(part) for part in parts], rows, each=cluster.map_tasks)
    for name, part in named.parts.items():
        draft.register(name, part)
    draft.write_json(semantic_id.BY_CODE_SUMMARY, named.ranges)
    found = _report(config, named, draft, earlier)
    log.info(
        "%s semantic IDs, %s of them share all codes with an earlier one, residual energy %.3f: %s",
        f"{found['documents']:,}",
        f"{found['collisions']:,}",
        found["levels"][-1]["residual_energy"],
        output,
    )
    return draft.commit(counts={name: found[name] for name in ("documents", "collisions")})


def part_rows(artifact: Artifact, parts: Sequence[str]) -> list[int]:
    """Number of rows of table parts."""
    return [*artifact.rows_of(parts).values()]


def sample(embeddings: Artifact, *, documents: int, seed: int) -> list[Any]:
    """References to the matrices of an even sample of the embeddings, for a task that joins them."""
    parts = embeddings.names("embeddings/", ".parquet")
    taken = _sampled_parts(parts, shares(part_rows(embeddings, parts), size=documents, seed=seed))
    each = len(taken) // SAMPLE_TASKS + 1
    take, source = ray.remote(num_cpus=1, **cluster.RETRY_OPTIONS)(_read_sample), ray.put(embeddings)
    return [take.remote(source, taken[at : at + each], seed) for at in range(0, len(taken), each)]


def read_vectors(embeddings: Artifact, part: str) -> tuple[pa.ChunkedArray, Float[ndarray, "docs dim"]]:
    """Document ids and vectors of an embeddings part; ArtifactError where a vector is not finite."""
    table = embeddings.table(part, columns=["doc_id", VIEW])
    vectors = to_numpy(table[VIEW])
    broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(broken):
        first = table["doc_id"][int(broken[0])].as_py()
        raise ArtifactError(
            f"{embeddings.uri}/{part}: {len(broken)} vectors are not finite, first of document {first!r}: "
            "re-run the encode stage"
        )
    return table["doc_id"], vectors


def use_threads(resources: Resources) -> None:
    """Limit faiss to the worker's cores: it takes all cores of the node otherwise."""
    faiss.omp_set_num_threads(max(1, int(resources.cpus_per_worker)))


def _sampled_parts(parts: Sequence[str], wanted: Sequence[int]) -> list[SampledPart]:
    return [
        (part, number, take) for number, (part, take) in enumerate(zip(parts, wanted, strict=True)) if take
    ]


def _read_sample(
    embeddings: Artifact, taken: Sequence[SampledPart], seed: int
) -> Float[ndarray, "chosen dim"]:
    drawn: list[ndarray] = []
    for part, number, take in taken:
        vectors = read_vectors(embeddings, part)[1]
        drawn.append(np.take(vectors, draw(len(vectors), take=take, seed=seed, part=number), axis=0))
    return np.concatenate(drawn)


def _require_fitting(
    config: QuantizeConfig, earlier: Artifact, source: Artifact, parts: Sequence[str]
) -> None:
    """Check that earlier codebooks have the shape and beam of the config, and the embeddings' dimension."""
    levels, codes, dim = safetensors.load(earlier.read_bytes(CODEBOOKS))["codebooks"].shape
    wanted = {"levels": config.levels, "codes": config.codes, "beam": config.beam}
    made = {"levels": levels, "codes": codes, "beam": earlier.manifest.config.get("beam", config.beam)}
    if wanted != made:
        knobs = " ".join(f"quantize.{name}={value}" for name, value in made.items())
        raise ConfigError(f"IDs stay only with the settings that made {earlier.uri}: set {knobs}")
    if not parts:
        raise ArtifactError(
            f"{source.uri} has no embedding: every document was set aside, see its rejected.parquet"
        )
    with fs.open_input(fs.join(source.uri, parts[0])) as stream:
        found = pq.read_schema(stream).field(VIEW).type.list_size
    if found != dim:
        raise ArtifactError(
            f"{earlier.uri} has codebooks of {dim} dimensions, {source.uri} embeddings of {found}: "
            "unset quantize.codebooks to fit new ones"
        )


def _sample_size(config: QuantizeConfig, rows: Sequence[int]) -> int:
    """Size of the sample; at least a tenth of the corpus is left out, to compare new documents with."""
    documents = sum(rows)
    return min(config.sample_documents, max(documents - documents // 10, min(config.codes, documents)))


def _codebooks(config: QuantizeConfig, draft: Draft, source: Artifact, earlier: Artifact | None) -> bytes:
    if earlier is not None:
        return earlier.read_bytes(CODEBOOKS)
    if fs.exists(draft.path(CODEBOOKS)):  # fitted before the run was killed
        return fs.read_bytes(draft.path(CODEBOOKS))
    parts = source.names("embeddings/", ".parquet")
    rows = part_rows(source, parts)
    size = _sample_size(config, rows)
    if size > config.documents_per_worker:
        return _dump(
            _refined(config, draft.work("fit"), source, parts, shares(rows, size=size, seed=config.seed))
        )
    matrices = sample(source, documents=size, seed=config.seed)
    fit = ray.remote(**cluster.actor_options(config.resources))(_fit)
    return _dump(cluster.task_result(fit.remote(config, *matrices)))


def _fit(config: QuantizeConfig, *matrices: Float[ndarray, "_ dim"]) -> Float[ndarray, "levels codes dim"]:
    use_threads(config.resources)
    return kmeans.fit(
        np.concatenate(matrices),
        levels=config.levels,
        codes=config.codes,
        iterations=config.iterations,
        seed=config.seed,
    )


def _refined(
    config: QuantizeConfig, folder: str, source: Artifact, parts: Sequence[str], wanted: Sequence[int]
) -> Float[ndarray, "levels codes dim"]:
    """Codebooks of a sample in files, of which a task holds one; `wanted` rows of each part."""
    # At most 1024 files, whose sums pass through the driver in every pass.
    limit = min(config.documents_per_worker, max(ROWS_PER_SLICE, sum(wanted) // 1024))
    taken = _sampled_parts(parts, wanted)
    groups = group_by_size([take for _, _, take in taken], limit=limit)
    files = [[taken[place] for place in group] for group in groups]

    def each(work: Callable[[Any], Any], items: Sequence[Any]) -> Iterable[Any]:
        threaded = partial(_with_threads, work=work, resources=config.resources)
        return cluster.map_tasks_in_order(threaded, items, config.resources)

    keep = partial(_store_sample, source=source, seed=config.seed, folder=folder)
    held = run_slices("sample", keep, files, folder=folder, each=each, section="quantize", unit="files")
    return kmeans.fit_files(config, held, folder=folder, each=each)


def _store_sample(item: tuple[int, list[SampledPart]], *, source: Artifact, seed: int, folder: str) -> int:
    return kmeans.store(_read_sample(source, item[1], seed), folder=folder, file=item[0])


def _with_threads(item: Any, *, work: Callable[[Any], Any], resources: Resources) -> Any:
    use_threads(resources)
    return work(item)


def _code(
    config: QuantizeConfig, parts: Sequence[str], rows: Sequence[int], draft: Draft, source: Artifact
) -> None:
    size = 0 if config.codebooks else _sample_size(config, rows)
    takes = shares(rows, size=size, seed=config.seed)
    items = [[part, take] for part, take in zip(parts, takes, strict=True)]
    code = cluster.Loaded(partial(_Coder, config, source, draft.path(CODEBOOKS), draft.work()))
    each = partial(cluster.map_loaded, resources=config.resources)
    folder = draft.work()
    run_slices("code", code, items, folder=folder, each=each, section="quantize", unit="documents", rows=rows)


class _Coder:
    """Codes parts of the embeddings, in an actor."""

    def __init__(self, config: QuantizeConfig, source: Artifact, codebooks: str, work: str) -> None:
        use_threads(config.resources)
        self._config, self._source, self._work = config, source, work
        self._codebooks = safetensors.load(fs.read_bytes(codebooks))["codebooks"]

    def __call__(self, item: tuple[int, list[Any]]) -> None:
        """Code a part, of which so many rows are in the sample: its number, its name and that number."""
        number, (part, sampled) = item
        doc_ids, vectors = read_vectors(self._source, part)
        codes = kmeans.encode(vectors, self._codebooks, beam=self._config.beam)
        energy = kmeans.residual_energy(vectors, codes, self._codebooks)
        fitted = np.zeros(len(codes), bool)
        fitted[draw(len(codes), take=sampled, seed=self._config.seed, part=number)] = True
        table = naming.coded_table(doc_ids, codes, energy, fitted)
        write_table(fs.join(self._work, _codes_part(part)), table)


def _report(
    config: QuantizeConfig, named: naming.NamedCorpus, draft: Draft, earlier: Artifact | None
) -> dict[str, Any]:
    """Contents of `statistics.json`; a proposed refit is also logged."""
    found = naming.report(named.tally, named.spread, collisions=named.collisions)
    fitted = named.unseen
    if earlier is not None:
        fitted = naming.load_tally(earlier.read_bytes(FITTED))
        found["drift"] = naming.drift(named.unseen, fitted, refit_above=config.refit_above)
        _log_drift(found["drift"], config)
    draft.write_bytes(FITTED, naming.dump_tally(fitted))
    draft.write_json(STATISTICS, found)
    return found


def _log_drift(drift: dict[str, Any], config: QuantizeConfig) -> None:
    if not drift["documents"]:
        log.info("every document has the ID it had")
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


def _dump(codebooks: Float[ndarray, "levels codes dim"]) -> bytes:
    data: bytes = safetensors.save({"codebooks": codebooks})
    return data


def _codes_part(part: str) -> str:
    """Name of the codes part of an embeddings part."""
    return "codes/" + part.removeprefix("embeddings/")
