"""The cross-encoder on Ray: trained like stage I, then used as a teacher.

    triplets, documents     ─run─►            cross_encoder
    triplets, documents     ─run_queries─►    query_embeddings: proxies of queries, scores of triplets
    documents               ─run_documents─►  embeddings: proxies of documents, read with an empty query

The last two have the same form as those of a dual encoder, so a student learns from either kind of teacher.

A query's proxy is computed from a pair: the query and its first positive. A generated query is paired with
the positive of its source query, which is similar (EmbedDistill, sections 4.2 and 4.3).
"""

from functools import partial
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.core import cluster
from scalingnote.core.config import validate
from scalingnote.core.log import get_logger
from scalingnote.encode.config import EncodeConfig, TeacherConfig
from scalingnote.encode.documents import encode_documents, tower_similarity
from scalingnote.encode.parts import EncodedPart, write_parts
from scalingnote.models import backbone as backbones
from scalingnote.models.config import BackboneConfig, Pretrained, TowerConfig
from scalingnote.models.cross_encoder import FACTS, CrossEncoder, with_placeholder
from scalingnote.models.prompt import DocumentPrompt, TokenRow
from scalingnote.models.weights import write_vocabulary
from scalingnote.storage import arrow, schema
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from scalingnote.storage.shuffle import hash_of
from scalingnote.train.config import DualPooledConfig, TrainConfig
from scalingnote.train.cross_encoder.pairs import PairBatches, PairEncoder, PairStage
from scalingnote.train.data import Order, Store
from scalingnote.train.job import RankTraining, TrainingRun, launch
from scalingnote.train.prepare import PreparedStore, prepare, read_array
from scalingnote.train.tokens import MISSING_ROW, row_numbers

log = get_logger("cross")
MODEL = "model"
TEMPLATE = "{title} {topic} {content}"  # fields of a document
QUERY_POSITIVES = pa.schema(
    {"query_id": pa.string(), "query": pa.string(), "split": pa.string(), "positive": pa.string()}
)


def run(config: DualPooledConfig, *, dataset: str, triplets: str, output: str) -> Artifact:
    """Train the cross-encoder. After a kill at any time, the next call resumes from the newest checkpoint."""
    uris = {"dataset": dataset, "triplets": triplets}
    parents = {kind: open_artifact(uri, kind=kind) for kind, uri in uris.items()}
    draft = Draft(output, kind="cross_encoder", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    prepared = prepare(
        as_stage_one(config),
        dataset=parents["dataset"],
        triplets=parents["triplets"],
        folder=draft.work("data"),
        each=cluster.map_tasks,
    )
    steps = Order(config, prepared.sizes).steps
    rows = sum(prepared.sizes.values())
    log.info("%s triplets, %s documents, %d steps", f"{rows:,}", f"{prepared.documents:,}", steps)
    rank = partial(_prepare_rank, config=config, prepared=prepared)
    steps = launch(rank, TrainingRun(config, "cross", output, steps))
    return draft.commit(counts={"triplets": rows, "documents": prepared.documents, "steps": steps})


def run_queries(
    config: TeacherConfig, *, dataset: str, triplets: str, cross_encoder: str, output: str
) -> Artifact:
    """Embed training queries, including generated ones, and score the documents of every triplet.

    All arguments except `config` are URIs; `output` is that of the query embeddings.
    """
    uris = {"dataset": dataset, "triplets": triplets, "cross_encoder": cross_encoder}
    parents = {kind: open_artifact(uri, kind=kind) for kind, uri in uris.items()}
    draft = Draft(output, kind="query_embeddings", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    source, teacher = parents["triplets"], parents["cross_encoder"]
    trained = validate(DualPooledConfig, teacher.manifest.config, source=teacher.uri)
    # Documents are read by number, the same as in training: the pairs of a part name them in any order.
    prepared = prepare(
        as_stage_one(trained, backbone=Pretrained(path=str(teacher.directory(MODEL)))),
        dataset=parents["dataset"],
        triplets=source,
        folder=draft.work("data"),
        each=cluster.map_tasks,
    )
    triplet_rows = source.rows_of(source.table_parts("triplets"))
    rows = {
        name.replace("triplets/", folder, 1): count
        for folder in ("embeddings/", "scores/")
        for name, count in triplet_rows.items()
    }
    encoder = partial(
        PairQueryParts,
        cross_encoder=teacher,
        triplets=source,
        store=prepared.store,
        config=config,
        vocabulary_part=next(iter(rows)),
        vocabulary_folder=draft.path("teacher"),
    )
    records = write_parts(
        encoder, draft, rows=rows, resources=config.resources, unit="triplets", knob="teacher.resources"
    )
    embedded = sum(r["part"]["rows"] for r in records if r["name"].startswith("embeddings/"))
    counts = {"queries": embedded, "scored": sum(triplet_rows.values())}
    return draft.commit(counts=counts, similarity=tower_similarity(teacher))


def run_documents(config: EncodeConfig, *, dataset: str, cross_encoder: str, output: str) -> Artifact:
    """Embed every document with an empty query, in the order and parts of the dataset.

    The results are unit vectors if the cross-encoder scores by cosines; if it scores by products, they keep
    their length.
    """
    teacher = open_artifact(cross_encoder, kind="cross_encoder")
    return encode_documents(config, dataset, teacher, output, load_encoder=_pair_encoder, load_prompt=_prompt)


def _pair_encoder(teacher: Artifact, token_budget: int) -> PairEncoder:
    temperature = teacher.manifest.config["temperature"]
    return PairEncoder.load(teacher.directory(MODEL), token_budget=token_budget, temperature=temperature)


def _prompt(teacher: Artifact) -> DocumentPrompt:
    facts = teacher.read_json(f"{MODEL}/{FACTS}")
    return DocumentPrompt.restore(
        {
            "special": facts["special"],
            "prompt": with_placeholder(facts["template"]),
            "max_length": facts["document_length"],
            "causal": False,
            "max_positions": None,
            "sparse": None,
        },
        teacher.read_bytes(f"{MODEL}/tokenizer.json").decode(),
    )


class PairQueryParts:
    """Worker that encodes the queries of a part of triplets, or scores their documents."""

    def __init__(
        self,
        *,
        cross_encoder: Artifact,
        triplets: Artifact,
        store: str,
        config: TeacherConfig,
        vocabulary_part: str,
        vocabulary_folder: str,
    ) -> None:
        """Load the models. The worker that encodes `vocabulary_part` also writes the teacher's vocabulary."""
        self._triplets, self._tokens = triplets, config.tokens
        self._vocabulary_part, self._vocabulary_folder = vocabulary_part, vocabulary_folder
        self._encoder = _pair_encoder(cross_encoder, config.token_budget)
        self._documents = Store.open(store)["documents"]
        self._named, self._place = (
            read_array(fs.join(store, f"{name}.arrow")) for name in ("wanted", "place")
        )
        self.peak = self._encoder.peak()

    def __call__(self, name: str, _: None) -> EncodedPart:
        """Compute the embeddings of a part's queries, or the scores of its rows."""
        return (self._score if name.startswith("scores/") else self._embed)(name)

    def _embed(self, name: str) -> EncodedPart:
        part = name.replace("embeddings/", "triplets/", 1)
        generated_part = name.replace("embeddings/", "generated/", 1)
        generated = (
            self._triplets.table(generated_part) if generated_part in self._triplets.manifest.parts else None
        )
        queries = distinct_queries(self._triplets.table(part), generated)
        documents = self._read(queries["positive"])
        rows = self._encoder.model.query_prompt.rows(queries["query"].to_pylist())
        embeddings = self._encoder.queries(rows, documents)
        cost = self._encoder.cost
        if name == self._vocabulary_part:
            self._write_vocabulary()
        out = queries.drop_columns(["positive"]).append_column(
            schema.embedding_field("embedding", self._encoder.dim), arrow.to_arrow(embeddings)
        )
        return EncodedPart(out, cost)

    def _score(self, name: str) -> EncodedPart:
        """Compute scores of each row's positive and negatives, null if one of them cannot be read."""
        table = self._triplets.table(
            name.replace("scores/", "triplets/", 1), ["query", "positive", "negatives"]
        )
        rows = self._encoder.model.query_prompt.rows(table["query"].to_pylist())
        group = [
            [positive, *negatives]
            for positive, negatives in zip(
                table["positive"].to_pylist(), table["negatives"].to_pylist(), strict=True
            )
        ]
        documents = self._read(pa.array([doc_id for ids in group for doc_id in ids], pa.string()))
        repeated = [row for row, ids in zip(rows, group, strict=True) for _ in ids]
        pairs = [(q, d) for q, d in zip(repeated, documents, strict=True) if d is not None]
        scores = np.full(len(documents), np.nan, np.float32)
        scores[[document is not None for document in documents]] = self._encoder.scores(
            [query for query, _ in pairs], [document for _, document in pairs]
        )
        starts = np.cumsum([0, *map(len, group)])
        lists = [scores[start:stop].tolist() for start, stop in pairwise(starts.tolist())]
        complete_lists = [None if np.isnan(values).any() else values for values in lists]
        return EncodedPart(
            pa.table({"scores": pa.array(complete_lists, pa.list_(pa.float32()))}), self._encoder.cost
        )

    def _read(self, doc_ids: pa.Array | pa.ChunkedArray) -> list[TokenRow | None]:
        """Read token rows of documents; None for one that is null, or cannot be read."""
        rows = row_numbers(hash_of(pc.fill_null(doc_ids, "")), self._named, self._place)
        rows[np.asarray(pc.is_null(doc_ids))] = MISSING_ROW
        distinct = np.unique(rows[rows >= 0])
        texts = dict(zip(distinct.tolist(), self._documents.tokens(distinct), strict=True))
        return [texts.get(row) for row in rows.tolist()]

    def _write_vocabulary(self) -> None:
        model, token_proxies = self._encoder.model, None
        if self._tokens:
            size = model.query_prompt.tokenizer.get_vocab_size()
            rows = [model.query_prompt.row([token]) for token in range(size)]
            token_proxies = self._encoder.queries(rows, [None] * size)
        write_vocabulary(
            self._vocabulary_folder,
            tokens=model.token_embeddings.weight,
            alone=token_proxies,
            tokenizer_json=model.tokenizer.backend_tokenizer.to_str(),
        )


def distinct_queries(triplets: pa.Table, generated: pa.Table | None) -> pa.Table:
    """List the queries of some triplets, each once, and the document that each is read with.

    Generated queries with a validation query as their source are left out: its measure would be too good.

    Returns:
        Rows of QUERY_POSITIVES in their order, generated ones last; `positive` is null if there is none.
    """
    ids = triplets["query_id"].combine_chunks()
    _, first = np.unique(pc.dictionary_encode(ids).indices.to_numpy(), return_index=True)
    originals = triplets.take(pa.array(np.sort(first))).select(QUERY_POSITIVES.names)
    if generated is None:
        return originals.cast(QUERY_POSITIVES)
    source = pc.index_in(generated["source_query_id"], value_set=originals["query_id"].combine_chunks())
    split = originals["split"].take(source)
    additional = pa.table(
        {
            "query_id": generated["query_id"],
            "query": generated["query"],
            "split": pa.array(["train"] * len(generated), pa.string()),
            "positive": originals["positive"].take(source),
        },
        schema=QUERY_POSITIVES,
    )
    held_out = pc.fill_null(pc.equal(split, "validation"), False)
    return pa.concat_tables([originals.cast(QUERY_POSITIVES), additional.filter(pc.invert(held_out))])


def as_stage_one(config: DualPooledConfig, *, backbone: BackboneConfig | None = None) -> TrainConfig:
    """Build the stage I config that prepares tokens of queries and documents, later read as pairs."""
    backbone = backbone or config.backbone
    document = with_placeholder(TEMPLATE)
    return TrainConfig(
        query=TowerConfig(backbone=backbone, max_length=config.query_length),
        document=TowerConfig(backbone=backbone, max_length=config.document_length, prompt=document),
    )


def _prepare_rank(
    rank: int, world: int, *, config: DualPooledConfig, prepared: PreparedStore
) -> RankTraining:
    def build_stage() -> PairStage:
        model = CrossEncoder(
            backbones.build(
                config.backbone, tokenizer_json=prepared.tokenizers.get("query"), seed=config.seed
            ),
            pooling=config.pooling,
            dim=None,
            query_length=config.query_length,
            document_length=config.document_length,
            template=TEMPLATE,
            reconstruct=config.losses.reconstruction > 0,
            seed=config.seed,
        )
        return PairStage(model, config.losses, temperature=config.temperature)

    stage, order = build_stage(), Order(config, prepared.sizes)
    options = {"pad": stage.model.pad, "in_batch": config.in_batch, "rank": rank, "world": world}
    batches = PairBatches(Store.open(prepared.store), order, **options)
    return RankTraining(
        stage, build_stage, batches, save=lambda trained, folder: trained.model.save(folder / MODEL)
    )
