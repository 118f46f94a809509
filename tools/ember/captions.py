"""Random scenes with captions: text-to-image captions, and edit instructions with one or two reference images.

A scene is a vector of 35 numbers (see `scenes.py`): four objects of seven (image, hue turn, effect, scale, x, y, flip) and a
background of seven (kind, first colour, second colour). Everything here runs on the CPU in worker processes.

A caption fixes the image: a name stands for one item, no style means 3d, no place the middle. Only a background that no caption names varies, so
other seeds give other ones. Whatever else varies without a word for it, four steps draw as the mean of its variants.
"""

import random

import numpy as np

import groups
from config import STYLES
from data import Library, load_tokenizer, token_ids
from groups import HALF, LAND, NIGHT, article
from names import ADJECTIVES, BASIC_COLOURS, COLOUR_ALIASES, COLOUR_WORDS, COLOURS, HELD_OUT, HUES, LANDSCAPES, STYLE_WORDS

OBJECTS = 4
SCENE_SIZE = 7 * OBJECTS + 7
NO_OBJECT = [-1, 0, 0, 1, 0, 0, 0]
WHITE = [0] + [1.0] * 6
# Position of a single object unless the caption gives another. Jitter here would be noise that no prompt controls.
MIDDLE = dict(scale=.85, x=0, y=0)
SMALL, BIG = .46, 1.0
SOLID, VERTICAL, DIAGONAL, STRIPES, DOTS, CHECKERS = range(6)
CORNERS = (
    (-.25, 0, "on the left"), (.25, 0, "on the right"), (0, -.25, "at the top"), (0, .25, "at the bottom"),
    (-.25, -.25, "in the top left corner"), (.25, -.25, "in the top right corner"),
    (-.25, .25, "in the bottom left corner"), (.25, .25, "in the bottom right corner"),
)
# share of the captions; the rest are single objects
MIX = ((.19, groups.two_objects), (.19, groups.related), (.14, groups.several), (.10, groups.landscape), (.03, groups.effect), (.01, groups.empty))
# backgrounds where a caption names none, besides white
UNNAMED = ("light blue", "light green", "lavender", "light grey", "mint", "peach", "beige", "pink", "yellow", "cyan")
TYPOS = .03


def fix_articles(text):
    words = text.split()
    for k, word in enumerate(words[:-1]):
        if word in ("a", "an"):
            words[k] = "an" if words[k + 1][0] in "aeiou" else "a"
    return " ".join(words)


def rgb(colour):
    return [v / 255 for v in COLOURS[colour]]


class Writer:
    """Draws scenes and their captions from one random stream."""

    white = WHITE

    def __init__(self, library, seed):
        self.library, self.random = library, random.Random(seed)

    def pick(self):
        return min(int(np.searchsorted(self.library.cumulative, self.random.random())), len(self.library.items) - 1)

    def pick_pair(self):
        """Returns two different items and a style that both have; people, faces and signs, which few ask for in groups, are rarer."""
        usual = lambda k: self.library.items[k]["group"] not in (0, 1, 8) or self.random.random() < .4
        while True:
            first, second = self.pick(), self.pick()
            if not usual(first) or not usual(second):
                continue
            common = [s for s in STYLES if s in self.library.items[first]["ids"] and s in self.library.items[second]["ids"]]
            if first != second and common:
                return first, second, self.random.choice(common)

    def name(self, item, colour=None):
        r, x = self.random, self.random.random()
        if x < 0.24 and item["plain"]:
            name = r.choice(item["plain"])
        elif x < 0.40 and item["alt"]:
            name = r.choice(item["alt"])
        elif x < 0.45 and item["rare"]:
            name = r.choice(item["rare"])
        else:
            name = item["label"]
        if len(name) > 4 and r.random() < TYPOS:
            name = self.misspelt(name)
        if colour:
            words = name.split()
            if len(words) > 1 and words[0] in COLOUR_WORDS:
                name = " ".join(words[1:])
            name = colour + " " + name
        return name

    def misspelt(self, name):
        """Returns the name with one letter missing, doubled, or swapped with the next."""
        r, k = self.random, self.random.randrange(1, len(name) - 1)
        return r.choice([name[:k] + name[k + 1:], name[:k] + name[k] + name[k:], name[:k] + name[k + 1] + name[k] + name[k + 2:]])

    def hue(self, item, style, chance):
        """Returns a colour for the object, or None. Never a held-out pair."""
        dominant = item["dom"].get(style)
        if not dominant or not dominant["ok"] or self.random.random() > chance:
            return None
        while True:
            colour = self.random.choice([*HUES, "grey"])
            if colour != dominant["name"] and (item["hex"], "hue", colour) not in HELD_OUT:
                return colour

    def background(self, *items):
        """Returns (seven numbers, phrase). Never a colour held out for one of `items`."""
        r = self.random
        spoken = lambda colour: r.choice(COLOUR_ALIASES.get(colour, [colour]))
        while True:
            x = r.random()
            first = second = r.choice(BASIC_COLOURS) if r.random() < 0.6 else r.choice(list(COLOURS))
            if x < 0.72:
                kind, phrase = SOLID, r.choice(["{}", "{}", "{}", "solid {}", "plain {}"]).format(spoken(first))
            else:
                second = r.choice(BASIC_COLOURS)
                if second == first:
                    continue
                a, b = spoken(first), spoken(second)
                if x < 0.83:
                    kind, phrase = VERTICAL, r.choice([f"{a} to {b} gradient", f"{a} and {b} gradient"])
                elif x < 0.86:
                    kind, phrase = DIAGONAL, f"diagonal {a} to {b} gradient"
                elif x < 0.91:
                    kind, phrase = STRIPES, f"{a} and {b} striped"
                elif x < 0.96:
                    kind, phrase = DOTS, r.choice([f"{a} background with {b} polka dots", f"{a} and {b} polka dot"])
                else:
                    kind, phrase = CHECKERS, f"{a} and {b} checkered"
            if any((item["hex"], "bg", colour) in HELD_OUT for item in items for colour in (first, second)):
                continue
            return [kind] + rgb(first) + rgb(second), phrase

    def unnamed(self, *items):
        """Returns a background for a caption that names none."""
        colours = [c for c in UNNAMED if not any((item["hex"], "bg", c) in HELD_OUT for item in items)]
        return WHITE if self.random.random() < .6 else [SOLID] + rgb(self.random.choice(colours)) * 2

    def object(self, index, style, hue=None, scale=None, x=None, y=None, flip=0):
        r = self.random
        return dict(
            index=index, style=style, hue=hue, flip=flip, scale=r.uniform(.80, .90) if scale is None else scale,
            x=r.uniform(-.03, .03) if x is None else x, y=r.uniform(-.03, .03) if y is None else y,
        )

    def scene(self, objects, background):
        values = []
        for o in objects:
            item, turn = self.library.items[o["index"]], 0.0
            if o["hue"] and o["hue"] != "grey":
                turn = ((HUES[o["hue"]] - item["dom"][o["style"]]["h"]) % 360) / 360
            values += [item["ids"][o["style"]], turn, float(o["hue"] == "grey") or o.get("effect", 0), o["scale"], o["x"], o["y"], o["flip"]]
        return values + NO_OBJECT * (OBJECTS - len(objects)) + background

    def on_background(self, phrase):
        r = self.random
        if "background" in phrase:
            return r.choice([" on a ", ", ", " with a "]) + phrase
        plain = f" on {article(phrase)} background"
        return r.choice([
            plain, plain, plain, f", {phrase} background", f" with {article(phrase)} background", f" against {article(phrase)} background",
            f" on {phrase}", f" in front of {article(phrase)} background", f". The background is {phrase}",
        ])

    def finish(self, text):
        if self.random.random() < 0.5:
            text = fix_articles(text)
        if self.random.random() < 0.10:
            text = text[0].upper() + text[1:]
        return text + ("." if self.random.random() < 0.06 else "")

    def text_to_image(self):
        """Returns (scene, caption)."""
        x = self.random.random()
        for share, draw in MIX:
            x -= share
            if x < 0:
                return draw(self)
        return self._one_object()

    def plain(self):
        """Returns (scene, caption) of a lone thing that the caption describes completely: nothing varies but the wording."""
        return self._one_object(plain=True)

    def default_style(self, *items):
        """Returns the style of a caption that names none; None if the items have none in common."""
        return next((s for s in STYLES if all(s in item["ids"] for item in items)), None)

    def _one_object(self, plain=False):
        r = self.random
        index = self.pick()
        item = self.library.items[index]
        unstyled = r.random() < .4
        wanted = r.choice(STYLES)
        style = wanted if wanted in item["ids"] and not unstyled else self.default_style(item)
        hue, natural = self.hue(item, style, .15 if plain else .27), item["dom"].get(style)
        colour = hue or (natural["name"] if natural and natural["ok"] and r.random() < .3 else None)
        size, word, place, where = 1 if plain else r.random(), "", MIDDLE, ""
        if size < .05:
            place, word = dict(MIDDLE, scale=SMALL), r.choice(["small", "tiny", "little"])
        elif size < .10:
            place, word = dict(MIDDLE, scale=BIG), r.choice(["big", "large", "huge"])
        elif size < .15:
            x, y, where = r.choice(CORNERS)
            place, word = dict(scale=SMALL, x=x, y=y), "small" if r.random() < .6 else ""
        elif item["group"] not in (0, 8) and r.random() < .12:
            word = r.choice(ADJECTIVES)
        name = self.name(item, colour)
        if r.random() < .06 and item["tags"]:
            name += ", " + r.choice([t for t in item["tags"] if t.isascii()] or [item["label"]])
        background, phrase = self.background(item)
        silent = r.random() < (.4 if unstyled else .1)
        if silent:
            background = WHITE if plain else self.unnamed(item)
        if unstyled:
            core = r.choice([f"a {word} {name}", f"a {word} {name}", f"{word} {name}", f"{word} {name}", f"an emoji of a {word} {name}", f"a picture of a {word} {name}", f"an image of a {word} {name}", f"draw a {word} {name}", f"the {word} {name}"])
        else:
            s = r.choice(STYLE_WORDS[style])
            core = r.choice([f"a {s} {word} {name}"] * 3 + [
                f"{s} {word} {name}", f"a {word} {name} in {s} style", f"a {s} emoji of a {word} {name}", f"a {s} icon of a {word} {name}",
                f"{word} {name}, {s} style", f"a {s} illustration of a {word} {name}", f"a {word} {name}, {s}", f"a {s} render of a {word} {name}",
            ])
        core = " ".join(core.split()) + (" " + where if where else "")
        tail = "" if silent else self.on_background(phrase)
        if r.random() < .10:
            core, tail = self._sentence(item, name, word, where, "" if unstyled else r.choice(STYLE_WORDS[style]), "" if silent else phrase)
        return self.scene([self.object(index, style, hue, **place)], background), self.finish(core + tail)

    def _sentence(self, item, name, word, where, style, phrase):
        """Returns a longer caption of the same scene, as a sentence."""
        r = self.random
        opening = r.choice(["please draw", "i would like a picture of", "show me", "create an image of", "make a drawing of", "there is", "this picture shows", "paint me", "generate"])
        thing = " ".join(f"a {word} {name}".split())
        text = f"{opening} {thing}"
        if where:
            text += r.choice([" ", " placed ", " that sits "]) + where
        if phrase:
            phrase = phrase.replace(" background", "")
            text += r.choice([f" in front of a {phrase} background", f" standing on a {phrase} background", f", and the background should be {phrase}", f". Use a {phrase} background", f" with nothing but {phrase} behind it"])
        if style:
            text += r.choice([f", in {style} style", f". It should look {style}", f". The style is {style}", f", drawn as a {style} icon", f", please make it {style}"])
        elif r.random() < .3:
            text += r.choice([", nice and clean", ", looking lovely", ", with soft light", ", high quality"])
        return text, ""

    def edit(self):
        """Returns (reference scene, target scene, instruction)."""
        while True:
            made = self._try_edit()
            if made:
                return made

    def _try_edit(self):
        r, items = self.random, self.library.items
        index = self.pick()
        item = items[index]
        style = r.choice(list(item["ids"]))
        hue = self.hue(item, style, .15)
        background, _ = self.background(item)
        # half of the references are placed as this model places things
        thing = self.object(index, style, hue, **(MIDDLE if r.random() < .5 else {}))
        source = self.scene([thing], background)
        it = r.choice(["it", "it", "the " + self.name(item), "this", "the image", "the object"])
        if r.random() < .16:
            return self._add(index, style, hue, background)
        x = r.random()
        if x < .05:
            kind, sky, ground, phrases = r.choice(LANDSCAPES)
            if any((item["hex"], "bg", c) in HELD_OUT for c in (sky, ground)):
                return None
            text = r.choice([f"put {it} {r.choice(phrases)}", f"{r.choice(phrases)}", f"make the background {r.choice(phrases).split(' ', 1)[1]}"])
            return source, self.scene([thing], [(NIGHT if kind == "night" else LAND) + groups.HORIZON] + rgb(sky) + rgb(ground)), text
        if x < .30:
            target, phrase = self.background(item)
            phrase = phrase.replace(" background", "")
            if r.random() < .06:
                target, phrase = WHITE, None
            text = r.choice(["remove the background", "delete the background", "white background"]) if phrase is None else r.choice([
                f"change the background to {phrase}", f"make the background {phrase}", f"put {it} on {article(phrase)} background", f"{phrase} background",
                f"replace the background with {phrase}", f"set the background to {phrase}", f"use {article(phrase)} background",
            ])
            return source, self.scene([thing], target), text
        if x < .50:
            other = next((s for s in item["ids"] if s != style), None)
            if not other or (hue and not item["dom"][other]["ok"]):
                return None
            word = r.choice(STYLE_WORDS[other])
            text = r.choice([f"turn {it} into a {word} icon", f"make {it} {word}", f"convert to {word} style", f"{word} style", f"in {word} style", f"change the style to {word}"])
            return source, self.scene([dict(thing, style=other)], background), text
        if x < .68:
            colour = self.hue(item, style, 1.0)
            if not colour or colour == hue:
                return None
            text = r.choice([f"make {it} {colour}", f"change the color to {colour}", f"recolor {it} {colour}", f"turn {it} {colour}", f"paint {it} {colour}", f"change the colour of {it} to {colour}"])
            return source, self.scene([dict(thing, hue=colour)], background), text
        if x < .76:
            small = dict(thing, scale=thing["scale"] * .58)
            if r.random() < .5:
                return source, self.scene([small], background), r.choice([f"make {it} smaller", f"shrink {it}", f"make {it} small"])
            return self.scene([small], background), source, r.choice([f"make {it} bigger", f"make {it} larger", f"enlarge {it}", f"make {it} big"])
        if x < .82:
            text = r.choice([f"flip {it} horizontally", f"mirror {it}", f"flip {it}", "flip the image", "mirror the image"])
            return source, self.scene([dict(thing, flip=1)], background), text
        if x < .89:
            colour = self.hue(item, style, 1.0)
            target, phrase = self.background(item)
            if not colour or colour == hue:
                return None
            phrase = phrase.replace(" background", "")
            text = r.choice([f"make {it} {colour} and the background {phrase}", f"change the background to {phrase} and the color to {colour}", f"{colour} on {article(phrase)} background"])
            return source, self.scene([dict(thing, hue=colour)], target), text
        other = self.pick()
        if other == index or style not in items[other]["ids"] or any((items[other]["hex"], "bg", c) in HELD_OUT for c in COLOURS):
            return None
        name = self.name(items[other])
        text = r.choice([f"replace {it} with {article(name)}", f"change {it} to {article(name)}", f"turn {it} into {article(name)}", f"swap {it} for {article(name)}"])
        return source, self.scene([dict(thing, index=other, hue=None)], background), text

    def _add(self, index, style, hue, background):
        """Adds a second thing to a lone one, or removes it."""
        r, items = self.random, self.library.items
        arrangement = r.choice(groups.ADDITIONS)
        second = groups.pick_second(self, arrangement, index, style)
        if second is None or any((items[second]["hex"], "bg", c) in HELD_OUT for c in COLOURS):
            return None
        pair = groups.arranged(self, arrangement, (index, second), style, (hue, None))
        alone = self.object(index, style, hue, **MIDDLE)
        name = r.choice(groups.HAT_WORDS) if items[second]["label"] == groups.HATS[0] and r.random() < .5 else self.name(items[second])
        before, after = self.scene([alone], background), self.scene(pair, background)
        if r.random() < .2:
            return after, before, r.choice([f"remove the {name}", f"take away the {name}", f"delete the {name}", f"without the {name}"])
        text = r.choice(groups.ADDED[arrangement]).format(article(name), it=r.choice(["it", "the " + self.name(items[index])]))
        return before, after, text

    def edit_two(self):
        """Returns (first reference, second reference, target scene, instruction)."""
        r, items = self.random, self.library.items
        first, second, style = self.pick_pair()
        one, two = items[first], items[second]
        ground_one, _ = self.background(one, two)
        ground_two, _ = self.background(one, two)
        a = self.object(first, style, self.hue(one, style, .15))
        b = self.object(second, style if r.random() < .6 else r.choice(list(two["ids"])))
        of_one = r.choice(["image 1", "image 1", "the first image", "picture 1", "the first picture"])
        of_two = of_one.replace("1", "2").replace("first", "second")
        thing = r.choice([self.name(one), self.name(one), "object"])
        other = r.choice([self.name(two), self.name(two), "object"])
        left = self.scene([a], ground_one)
        right = self.scene([b] if r.random() < .7 else [], ground_two)
        x = r.random()
        if x < .58:
            text = r.choice([
                f"put the {thing} of {of_one} onto the background of {of_two}", f"put the {thing} from {of_one} on the background of {of_two}",
                f"place the {thing} of {of_one} on the background of {of_two}", f"use the background of {of_two} for {of_one}",
                f"the {thing} of {of_one} on the background from {of_two}", f"take the {thing} of {of_one} and the background of {of_two}",
            ])
            return left, right, self.scene([a], ground_two), text
        right = self.scene([b], ground_two)
        if x < .80:
            text = r.choice([
                f"replace the {thing} of {of_one} with the {other} of {of_two}", f"put the {other} of {of_two} onto the background of {of_one}",
                f"put the {other} from {of_two} into {of_one}", f"swap the {thing} of {of_one} for the {other} of {of_two}",
            ])
            return left, right, self.scene([b], ground_one), text
        pair = [dict(a, scale=HALF, x=-.25, y=0), dict(b, scale=HALF, x=.25, y=0)]
        text = r.choice([
            f"put the {thing} of {of_one} next to the {other} of {of_two}", f"the {thing} of {of_one} and the {other} of {of_two} side by side",
            f"show the {thing} of {of_one} together with the {other} of {of_two}",
        ])
        return left, right, self.scene(pair, ground_one), text


KINDS = {"text": "text_to_image", "plain": "plain", "edit": "edit", "edit2": "edit_two"}
_worker = {}


def write_chunk(job):
    """Runs in a worker: (folder, tokenizer file, kind, seed, count) -> (scenes float32 `[count, images, 35]` with the target last, token ids int16 `[count, 64]`)."""
    folder, words, kind, seed, count = job
    if folder not in _worker:
        _worker[folder] = (Library(folder), load_tokenizer(words))
    library, tokenizer = _worker[folder]
    draw = getattr(Writer(library, seed), KINDS[kind])
    made = [draw() for _ in range(count)]
    return np.array([m[:-1] for m in made], np.float32), token_ids(tokenizer, [m[-1] for m in made])
