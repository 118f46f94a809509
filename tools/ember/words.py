"""Writes `words.toml`: the words that Ember's captions were made of, with which Kiln says what of a prompt it has not learned.

    python words.py data ../../assets/ember/words.toml

`data` is the folder of `fetch.py`. A word is listed if it is part of a name that stands for at most two images, or of the sentences around the
names. Tags that more images share were only appended to captions: they are not learned as names ("riding", "lake"), and not listed.
"""

import re
import sys
import textwrap

from captions import Writer
from data import Library
from groups import plural
from names import COLOUR_ALIASES, COLOURS, HUES, LANDSCAPES

CAPTIONS = 40_000
# words that add nothing to draw, and that prompts have and captions do not
GRAMMAR = """all also am any are been being both can could did do does each every had has have having he her hers him his its just
many most much my or our own please quite really she so some such than their them then these they those too us very was we were what when where which
who whose will you your""".split()
EXAMPLES = ("a cat", "a birthday cake", "a smiling face with sunglasses")
STYLES = ("3d", "flat", "pixel art", "silhouette")
BACKGROUNDS = ("on a blue background", "on a meadow", "in space", "on a pink and white striped background", "in the snow", "on the sea", "at night", "at sunset")


def words(text):
    return re.findall(r"[^\W_]+", text.lower())


def of_names(library):
    """Words of the names, with plurals that don't end in s."""
    names = [name for item in library.items for name in [item["label"], *item["alt"], *item["plain"], *item["rare"]]]
    irregular = [plural(name) for name in names if not plural(name).endswith("s")]
    return {word for name in names + irregular for word in words(name)}


def of_sentences(library):
    """Words of captions and instructions whose things have no names."""
    for item in library.items:
        item.update(label="thing", alt=[], plain=[], rare=[], tags=[])
    writer = Writer(library, 0)
    draws = (writer.text_to_image, writer.edit, writer.edit_two)
    return {word for draw in draws for _ in range(CAPTIONS) for word in words(draw()[-1])} - {"things"}


def toml_list(values):
    return "[" + ", ".join(f'"{value}"' for value in values) + "]"


def main(folder, out):
    library = Library(folder)
    known = of_names(library) | of_sentences(library) | set(GRAMMAR)
    colours = dict.fromkeys([*HUES, *COLOURS, *(alias for aliases in COLOUR_ALIASES.values() for alias in aliases)])
    known |= {word for _, _, _, phrases in LANDSCAPES for phrase in phrases for word in words(phrase)}
    listed = textwrap.fill(" ".join(sorted(word for word in known if word.isascii())), 118)
    with open(out, "w") as file:
        file.write(
            "# The words of Ember's captions. Written by tools/ember/words.py.\n"
            f'model = "Ember"\nsubject = "emoji"\nexamples = {toml_list(EXAMPLES)}\ncolours = {toml_list(colours)}\n'
            f"styles = {toml_list(STYLES)}\nbackgrounds = {toml_list(BACKGROUNDS)}\n"
            f'words = """\n{listed}\n"""\n'
        )
    print(len(known), "words")


if __name__ == "__main__":
    main(*sys.argv[1:])
