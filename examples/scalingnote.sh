#!/usr/bin/env bash
# The ScalingNote paper from logs to /search, one stage after the other: read it from top to bottom.
#
#   examples/scalingnote.sh                                    in minutes on two cores, without a download
#   CONFIG=my.yaml RUN=runs/mine examples/scalingnote.sh       on your data: docs/guides/train.md
#
# Every line builds an artifact in $RUN. A finished line is skipped, a killed one continues, and
# `scalingnote run $CONFIG` runs all of them.
set -euo pipefail
CONFIG=${CONFIG:-configs/quickstart/python_docs.yaml}
RUN=${RUN:-runs/scalingnote}
SET="--set run_dir=$RUN ${SET:-}"

# Check the data row by row: documents, queries, judgements and a log of impressions. Here the log is simulated
# from the judgements; with `dataset: {name: logs}` it is your platform's.
scalingnote run $CONFIG $SET --only prepare

# Compute the important words of a query: related queries share them, and use each other's clicks.
scalingnote run $CONFIG $SET --only planner

# Collect triplets of a query, a document that answers it and documents that do not, from clicks and rankings
# (Algorithm 1).
scalingnote run $CONFIG $SET --only collect

# Stage I: both towers start from the same LLM, and train to match queries with documents (ScalingDual).
scalingnote run $CONFIG $SET --only train

# Embed the training queries once with the trained query tower. Queries do not need the LLM after this line.
scalingnote run $CONFIG $SET --only teacher

# Stage II: train a small tower to produce the same embeddings for the same queries (QKD, Eq. 15).
scalingnote run $CONFIG $SET --only distill

# Embed every document once with the LLM.
scalingnote run $CONFIG $SET --only encode

# Assign semantic IDs to documents, and index their embeddings, tuned for the small tower's queries.
scalingnote run $CONFIG $SET --from quantize --until index

# Compare the small tower with the LLM, the index with exact search, and both with BM25: $RUN/report.html.
scalingnote run $CONFIG $SET --only evaluate

# Search, then serve the page, POST /search and metrics at http://localhost:8000, until CTRL-C.
scalingnote search "parse a date from a string" --run "$RUN"
if [ "${SERVE:-1}" != 0 ]; then scalingnote serve --run "$RUN"; fi
