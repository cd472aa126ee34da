"""A course on attention: pages, figures, exercises, a lab of variants."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
