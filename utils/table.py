"""Tables as lines of text."""

from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[object]], right_aligned: Sequence[int] = ()) -> str:
    """One line per row with aligned columns; the columns whose indices are in `right_aligned` are right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(cell.rjust(width) if k in right_aligned else cell.ljust(width) for k, (cell, width) in columns)
        for columns in (enumerate(zip(row, widths, strict=True)) for row in cells)
    )
    return "\n".join(line.rstrip() for line in lines)
