"""Embed the documents with a student's own tower: `python jobs/encode_student.py --config FILE`."""

import sys

from entrypoint import main

sys.exit(main("encode_student"))
