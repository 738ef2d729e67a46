"""Rows as the trainer will see them, before anything is run."""
from dflashctl import plan as plans


def show_rows(declaration: plans.Declaration, number: int, output: str) -> int:
    return 0
