"""Numbers as a person reads them."""


def format_value(value: float | None, unit: str) -> str:
    """A number with its unit for a person: bytes in MiB or GiB, shares in percent; a dash for None."""
    if value is None:
        return "-"
    if unit == "bytes":
        return f"{value / 2**30:,.2f} GiB" if abs(value) >= 2**30 else f"{value / 2**20:,.1f} MiB"
    if unit == "share":
        return f"{value:.1%}"
    number = f"{value:,}" if isinstance(value, int) else f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{number} {unit}" if unit in ("ms", "s", "tokens/s", "requests/s") else number
