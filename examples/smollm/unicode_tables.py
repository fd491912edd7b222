#!/usr/bin/env python3
"""Writes unicode_tables.inc: the code points that the tokenizer tells apart, as ranges.

Usage: unicode_tables.py > unicode_tables.inc

The Unicode version is that of the package unicodedata2 if it is installed, else that of Python.
The table is of 16.0, like that of the Python package tokenizers 0.23.
"""
import itertools

try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata

# The property White_Space, which unicodedata does not know.
WHITE_SPACE = {*range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B)}
WHITE_SPACE |= {0x2028, 0x2029, 0x202F, 0x205F, 0x3000}
CLASSES = {"L": "letter", "N": "number"}


def class_of(code):
    if code in WHITE_SPACE:
        return "space"
    return CLASSES.get(unicodedata.category(chr(code))[0], "other")


def main():
    ranges = []
    for name, codes in itertools.groupby(range(0x110000), class_of):
        codes = list(codes)
        if name != "other":
            ranges.append(f"{{0x{codes[0]:04x}, 0x{codes[-1]:04x}, k{name.title()}}},")
    print(f"// Written by unicode_tables.py, do not edit. Unicode {unicodedata.unidata_version}.")
    for i in range(0, len(ranges), 3):
        print(*ranges[i : i + 3])


if __name__ == "__main__":
    main()
