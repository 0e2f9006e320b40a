"""Text that is safe to show, and numbers of bytes as text."""

# Control characters that could steer a terminal; newlines and tabs are kept
CONTROL = dict.fromkeys({*range(32), *range(127, 160)} - {*b"\n\t"})


def format_bytes(size: int) -> str:
    """The size as text, such as "1.5 GiB"."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 999.5:  # 1000 and more would be written 1e+03
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"
