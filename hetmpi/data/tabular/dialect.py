"""How text is written: what divides and quotes its values, its encoding, and the sign before decimals.

A delimiter of several characters becomes the byte DIVIDER before Arrow reads a block; another encoding becomes UTF-8.
So values have the ids of the same values in other files."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from hetmpi.data.files import DataError
from hetmpi.errors import UserError, one_line

DIVIDER = "\x1f"
LONGEST = 16  # characters of a delimiter
POINT, COMMA = ".", ","
COMMA_TEXT = r"^([+-]?[0-9]*),([0-9]+([eE][+-]?[0-9]+)?)$"
OF_STATE = ("utf_7", "hz", "iso2022", "utf_16", "utf_32")  # encodings whose lines cannot be read each by itself


@dataclass(frozen=True)
class Dialect:
    """A field that is None is to be found: delimiter and decimal; text without an encoding is UTF-8, of which other
    bytes are kept; without a quote it has none."""

    delimiter: str | None = None
    quote: str | None = '"'
    encoding: str | None = None
    decimal: str | None = None

    def check(self) -> None:
        """Raises UserError for impossible values of the settings of data."""
        divider, quote = self.delimiter, self.quote
        is_text = isinstance(divider, str) and 0 < len(divider) <= LONGEST and divider.isascii()
        if divider is not None and not (is_text and not set(divider) & {"\r", "\n", DIVIDER, quote}):
            raise UserError(
                f"data.delimiter must be 1 to {LONGEST} characters of ASCII, no quotes or line ends, got {divider!r}"
            )
        if quote is not None and not (isinstance(quote, str) and len(quote) == 1 and quote.isascii() and quote > "\r"):
            raise UserError(f"data.quote must be one character, got {quote!r}")
        if self.encoding is not None and not is_encoding(self.encoding):
            raise UserError(
                f"data.encoding must be that of a text, as utf-8, latin-1, cp1252, utf-16 or gb18030, got "
                f"{one_line(self.encoding, 100)}"
            )
        if self.decimal not in (None, POINT, COMMA):
            raise UserError(f'data.decimal must be "." or ",", got {one_line(self.decimal, 100)}')
        if self.decimal == COMMA == divider:
            raise UserError('data.decimal="," cannot be the delimiter too: give data.delimiter=";" or another')


def is_encoding(name) -> bool:
    """Whether Python decodes text by this name."""
    try:
        b"a".decode(name)
    except UnicodeDecodeError:  # a is no whole character
        return True
    except (LookupError, TypeError, ValueError):
        return False
    return True


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def keeps_lines(encoding: str | None) -> bool:
    """Whether the byte of a line end is no part of another character, so that a file can be cut after any line."""
    name = "" if encoding is None else codecs.lookup(encoding).name.replace("-", "_")
    return not name.startswith(OF_STATE)


def decoded(texts: Iterable[bytes], encoding: str | None, path: str, is_cut: bool = False) -> Iterator[bytes]:
    """Text in UTF-8. is_cut: the last of `texts` may end within a character. Raises DataError for bytes that the
    encoding has not."""
    if encoding is None:
        yield from texts
        return
    decoder = codecs.getincrementaldecoder(encoding)()
    for text, is_last in itertools.chain(((text, False) for text in texts), [(b"", not is_cut)]):
        try:
            yield decoder.decode(text, is_last).encode(errors="surrogatepass")
        except UnicodeDecodeError as error:
            start = error.start
            near = error.object[max(0, start - 20) : start + 20]
            raise DataError(
                f"data.path: {path} is no text in data.encoding={encoding}: {error.reason} at the byte "
                f"0x{near[min(start, 20)]:02x} in {near!r}: give another data.encoding"
            ) from error


def as_single(text: bytes, delimiter: str) -> tuple[bytes, str]:
    """Text, and its delimiter of one character."""
    if len(delimiter) == 1:
        return text, delimiter
    return text.replace(delimiter.encode(), DIVIDER.encode()), DIVIDER


def restored(table: pa.Table, delimiter: str) -> pa.Table:
    """Columns of text with a delimiter of several characters, where it stands within quotes."""
    for i, column in enumerate(table.columns):
        if pa.types.is_binary(column.type):
            found = pc.replace_substring(column, DIVIDER.encode(), delimiter.encode())
            table = table.set_column(i, table.field(i), found)
    return table


def with_points(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Binary texts with a point in numbers with a decimal comma."""
    return pc.replace_substring_regex(texts, pattern=COMMA_TEXT, replacement=r"\1.\2")
