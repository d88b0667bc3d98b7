"""Embed the documents with a student's own tower: `python jobs/encode_student.py --config FILE`."""

from entrypoint import main

raise SystemExit(main("encode_student"))
