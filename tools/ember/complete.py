"""Completes prompts to the words that Ember knows best: `complete.py DATA PROMPT…` prints them, `complete.py DATA --table FILE` writes name -> label as JSON.

Ember draws "a 3d dog face on a white background" better than "a puppy": every training caption has a style or leaves it open, and what is left open comes out as a mean.
So a name or an emoji character becomes the label of its picture, a missing style becomes 3d, a missing background white, and a relation the nearest arrangement that was trained.
A prompt of which nothing is known stays as it is.
"""

import argparse
import json
import re

from captions import fix_articles
from data import Library
from groups import plural
from names import ADJECTIVES, COLOUR_WORDS, LANDSCAPES, STYLE_WORDS

STYLES = {word for words in STYLE_WORDS.values() for word in words}
PLACES = tuple(sorted((phrase for *_, phrases in LANDSCAPES for phrase in phrases), key=len, reverse=True))
ABOVE = ("above", "over", "sitting on", "standing on", "on top of", "riding", "on")
BESIDE = ("in front of", "next to", "wearing", "holding", "carrying", "eating", "beside", "inside", "behind", "with", "and", "in", "at")
BELOW = ("underneath", "under", "below", "beneath")
NUMBERS = {"two": 2, "three": 3, "four": 4, "2": 2, "3": 3, "4": 4}
SIZES = ("small", "big", "large", "tiny", "little", "huge")
LOOSE = {*ADJECTIVES, *SIZES, "cool", "golden"}


def names(library):
    """Returns name -> label, emoji characters included."""
    table = {}
    for item in library.items:
        mark = "".join(chr(int(code, 16)) for code in item["hex"].split("-"))
        for name in (item["label"], *item["plain"], *item["alt"], mark, mark.replace("\ufe0f", "")):
            table.setdefault(name, item["label"])
    return table


class Completer:
    def __init__(self, library):
        self.table = names(library)
        self.marks = sorted((n for n in self.table if not n.isascii()), key=len, reverse=True)
        self.natural = {item["label"]: item["dom"].get("3d", {}).get("name") for item in library.items}

    def thing(self, words, many):
        """Returns (size and colour, label) of a noun phrase without its article, or None."""
        for start in range(len(words)):
            found = " ".join(words[start:])
            single = [found.removesuffix("s"), found.removesuffix("es"), re.sub("ies$", "y", found)]
            for name in (*single, found) if many else (found,):
                if name in self.table and set(words[:start]) <= LOOSE | COLOUR_WORDS:
                    return [w for w in words[:start] if w in COLOUR_WORDS or w in SIZES], self.table[name]
        return None

    def __call__(self, prompt):
        text = prompt.lower().strip(" .!").replace("\ufe0f", "")
        for mark in self.marks:
            text = text.replace(mark.replace("\ufe0f", ""), f" {self.table[mark]} ") if mark.replace("\ufe0f", "") in text else text
        if any(word in text for word in STYLES) or "background" in text and "style" in text:
            return prompt
        text, tail = " ".join(text.split()), ""
        for phrase in PLACES:
            if text.endswith(" " + phrase):
                text, tail = text[:-len(phrase) - 1], " " + phrase
                break
        match = re.search(r",? (on|with|against|in front of) (a |an |the )?[a-z ]*background$|,? on (white|black|red|blue|green|yellow|pink|purple|grey|orange)$", text)
        if match:
            text, tail = text[:match.start()], match.group()
        parts = re.split(r" (%s) " % "|".join((*BELOW, *ABOVE, *BESIDE)), text)
        things = [self.counted(part) for part in parts[::2]]
        if len(things) > 2 or None in things:
            whole = self.counted(text)
            if whole is None:
                return prompt
            things, parts = [whole], [text]
        tail = tail or " on a white background"
        if len(things) == 2:
            relation = "above" if parts[1] in ABOVE else "below" if parts[1] in BELOW else "and"
            return fix_articles(f"{things[0]} {relation} {things[1]}") + tail
        return fix_articles(things[0]) + tail

    def counted(self, phrase):
        """Returns the phrase with the label, its style and its article or number, or None."""
        words = [w for w in phrase.split() if w not in ("a", "an", "the")]
        number = words[0] if words and words[0] in NUMBERS else None
        found = self.thing(words[1:] if number else words, bool(number))
        if not found:
            return None
        before, label = found
        if before and before[-1] in COLOUR_WORDS and self.natural.get(label) == before[-1]:
            before = before[:-1]
        if before and before[-1] in COLOUR_WORDS and label.split()[0] in COLOUR_WORDS:
            label = label.split(" ", 1)[1]
        core = " ".join(["3d", *before, plural(label) if number else label])
        return f"{number} {core}" if number else f"a {core}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("prompts", nargs="*")
    parser.add_argument("--table", metavar="FILE")
    args = parser.parse_args()
    library = Library(args.data)
    if args.table:
        with open(args.table, "w") as file:
            json.dump(names(library), file, ensure_ascii=False, separators=(",", ":"))
    complete = Completer(library)
    for prompt in args.prompts:
        print(complete(prompt))


if __name__ == "__main__":
    main()
