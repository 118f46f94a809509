"""Text-to-image scenes other than a lone object: two to four things, things in a relation, landscapes, effects, backgrounds alone.

Every function takes a `captions.Writer` and returns (scene, caption). Things have one of three sizes, and shifts are whole tokens of a 256-pixel image,
so that what is learnt for one arrangement serves all.
"""

from names import COLOURS, EYEWEAR, HAT_WORDS, HATS, HELD_OUT, LANDSCAPES, STYLE_WORDS

HALF, LARGE, FULL = .46, .62, .85
LAND, NIGHT = 6, 7  # kinds of background; their fraction moves the horizon, which no caption names
HORIZON = .5
HORIZONS = (.1, .3, .5, .7, .9)  # that `judge.py` allows
SILHOUETTE, PIXELS = 2, 3  # effects; 1 is grey
SIDE_BY_SIDE, STACKED = ((-.25, 0), (.25, 0)), ((0, -.25), (0, .25))
PYRAMID = ((0, -.25), (-.25, .25), (.25, .25))
QUARTERS = ((-.25, -.25), (.25, -.25), (-.25, .25), (.25, .25))
NUMBERS = {2: ("two", "two", "2", "a pair of"), 3: ("three", "three", "3"), 4: ("four", "four", "4")}
EFFECTS = {
    SILHOUETTE: ("silhouette of {}", "the silhouette of {}", "black silhouette of {}", "{} as a silhouette", "{}, silhouette"),
    PIXELS: ("pixel art of {}", "{} in pixel art style", "{}, pixel art", "pixel art {}", "{} as pixel art"),
    1: ("black and white picture of {}", "{} in black and white", "{}, black and white", "{} in greyscale"),
}
# Two things in a relation: (scale, x, y) of the first and of the second, and which of them is in front.
ARRANGEMENTS = {
    "on": ((HALF, 0, -4 / 16), (LARGE, 0, 3 / 16), 0),
    "hat": ((LARGE, 0, 3 / 16), (HALF, 0, -3 / 16), 1),
    "eyes": ((FULL, 0, 0), (HALF, 0, -1 / 16), 1),
    "holding": ((LARGE, -2 / 16, 0), (HALF, 4 / 16, 2 / 16), 1),
    "in": ((HALF, 0, 1 / 16), (FULL, 0, 0), 0),
    "front": ((HALF, 0, 4 / 16), (LARGE, 0, -2 / 16), 0),
    "right": ((HALF, -4 / 16, 0), (HALF, 4 / 16, 0), 1),
    "left": ((HALF, 4 / 16, 0), (HALF, -4 / 16, 0), 1),
}
RELATIONS = {
    "on": ("{a} on {b}", "{a} on {b}", "{a} sitting on {b}", "{a} standing on {b}", "{a} on top of {b}", "{a} riding {b}"),
    "hat": ("{a} wearing {b}", "{a} wearing {b}", "{a} with {b}", "{a} with {b} on its head", "{a} in {b}"),
    "eyes": ("{a} wearing {b}", "{a} with {b}", "{a} in {b}"),
    "holding": ("{a} holding {b}", "{a} holding {b}", "{a} that holds {b}", "{a} carrying {b}", "{a} eating {b}", "{a} playing with {b}"),
    "in": ("{a} in {b}", "{a} inside {b}", "{a} in {b}"),
    "front": ("{a} in front of {b}", "{b} behind {a}", "{a} under {b}"),
}
RELATION_SHARES = {"on": .28, "hat": .18, "eyes": .08, "holding": .22, "in": .12, "front": .12}
ADDITIONS = ("hat", "hat", "hat", "eyes", "holding", "right", "right", "left")
ADDED = {
    "hat": ("add {0}", "add {0}", "give {it} {0}", "put {0} on {it}", "with {0}", "wearing {0}", "add {0} on top"),
    "eyes": ("add {0}", "give {it} {0}", "put {0} on {it}", "wearing {0}"),
    "holding": ("let {it} hold {0}", "holding {0}", "give {it} {0} to hold", "add {0} in front"),
    "right": ("add {0}", "add {0} on the right", "put {0} next to {it}", "add {0} to the right", "place {0} beside {it}"),
    "left": ("add {0} on the left", "put {0} to the left of {it}", "add {0} to the left"),
}
CREATURES = (0, 1, 3)  # groups of faces, people, animals
# heads seen from the front, which can wear something over the eyes, besides all that are called faces
HEADS = ("fox", "wolf", "lion", "bear", "polar bear", "panda", "koala", "hamster", "frog", "raccoon", "owl", "robot", "ghost", "alien", "sun with face", "red apple", "pumpkin")
PLURALS = ("glasses", "goggles", "scissors", "jeans", "fries", "trousers", "pants", "shorts", "shades", "chopsticks", "gloves", "socks")
UNCHANGED_IN_PLURAL = ("fish", "sheep", "deer", "squid", "octopus")


def article(words):
    if words.endswith(PLURALS):
        return words
    return ("an " if words[0] in "aeiou" else "a ") + words


def plural(name):
    if name.endswith(UNCHANGED_IN_PLURAL):
        return name
    if name.endswith(("mouse", "person", "man", "child")):
        for one, many in (("mouse", "mice"), ("person", "people"), ("man", "men"), ("child", "children")):
            if name.endswith(one):
                return name[:-len(one)] + many
    if name.endswith("y") and name[-2:-1] not in tuple("aeiou"):
        return name[:-1] + "ies"
    return name + ("es" if name.endswith(("s", "x", "ch", "sh")) else "s")


def place(writer, things, style, hues, spots):
    return [writer.object(k, style, hue, HALF, x, y) for k, hue, (x, y) in zip(things, hues, spots)]


def named_style(writer, core, style):
    r, word = writer.random, writer.random.choice(STYLE_WORDS[style])
    return r.choice([f"{core} in {word} style", f"{core} in {word} style", f"{core}, {word}", f"{word} {core}", f"{core}, {word} style"])


def pick_second(writer, arrangement, first, style):
    """Returns an item that can stand in the relation to `first`, or None."""
    r, library = writer.random, writer.library
    if arrangement == "eyes" and library.items[first]["group"] != 0 and not library.items[first]["label"].endswith(("face", *HEADS)):
        return None
    if arrangement in ("hat", "eyes"):
        label = r.choice(HATS if arrangement == "hat" else EYEWEAR)
        second = next((k for k, item in enumerate(library.items) if item["label"] == label), None)
    else:
        second = writer.pick()
        if arrangement == "holding" and library.items[second]["group"] not in (3, 4, 6, 7):
            return None
        if library.items[second]["group"] in (0, 1, 8) and r.random() < .6:
            return None
    return second if second is not None and second != first and style in library.items[second]["ids"] else None


def arranged(writer, arrangement, things, style, hues):
    """Returns the objects of a pair, the one in front last."""
    one, two, front = ARRANGEMENTS[arrangement]
    objects = [writer.object(k, style, hue, *spot) for k, hue, spot in zip(things, hues, (one, two))]
    return objects if front else objects[::-1]


def related(writer):
    """Two things in a relation that people type: on, wearing, holding, in, in front of."""
    r, items = writer.random, writer.library.items
    arrangement = r.choices(list(RELATION_SHARES), list(RELATION_SHARES.values()))[0]
    while True:
        first = writer.pick()
        if items[first]["group"] not in CREATURES and (arrangement in ("hat", "eyes", "holding") or r.random() < .5):
            continue
        if items[first]["group"] in (0, 1) and r.random() < .6:
            continue
        named = r.random() < .5
        style = r.choice(list(items[first]["ids"])) if named else writer.default_style(items[first])
        second = pick_second(writer, arrangement, first, style)
        if second is not None:
            break
    one, two = items[first], items[second]
    hues = writer.hue(one, style, .10), writer.hue(two, style, .12)
    background, phrase = writer.background(one, two)
    name = r.choice(HAT_WORDS) if two["label"] == HATS[0] and not hues[1] and r.random() < .5 else writer.name(two, hues[1])
    first_name = writer.name(one, hues[0])
    if r.random() < .1:
        first_name = r.choice(("happy", "cute", "small", "funny")) + " " + first_name
    core = r.choice(RELATIONS[arrangement]).format(a=article(first_name), b=article(name))
    if named:
        core = named_style(writer, core, style)
    silent = r.random() < .4
    if silent:
        background = writer.unnamed(one, two)
    return writer.scene(arranged(writer, arrangement, (first, second), style, hues), background), writer.finish(core + ("" if silent else writer.on_background(phrase)))


def two_objects(writer):
    r, items = writer.random, writer.library.items
    first, second, style = writer.pick_pair()
    one, two = items[first], items[second]
    hues = writer.hue(one, style, .12), writer.hue(two, style, .12)
    background, phrase = writer.background(one, two)
    a, b = writer.name(one, hues[0]), writer.name(two, hues[1])
    word = r.choice(STYLE_WORDS[style])
    silent = r.random() < .3
    if r.random() < .25:
        spots = STACKED
        core = r.choice([
            f"{article(a)} above {article(b)}", f"{article(a)} over {article(b)}", f"{article(a)} at the top and {article(b)} at the bottom",
            f"{article(b)} below {article(a)}", f"{article(b)} under {article(a)}", f"{article(b)} underneath {article(a)}",
        ])
    else:
        spots = SIDE_BY_SIDE
        core = r.choice([
            f"{article(a)} and {article(b)}", f"{article(a)} and {article(b)}", f"{article(a)} next to {article(b)}",
            f"{article(a)} to the left of {article(b)}", f"{article(b)} to the right of {article(a)}", f"{a} and {b}", f"{article(a)} with {article(b)}",
            f"{article(a)} on the left and {article(b)} on the right", f"{article(b)} on the right and {article(a)} on the left",
            f"{article(a)} together with {article(b)}", f"{article(a)} beside {article(b)}",
        ])
    if style != writer.default_style(one, two) or r.random() < .35:
        core = r.choice([named_style(writer, core, style)] * 3 + ([f"a {word} {a} and a {word} {b}", f"{word} {a} and {b}", f"a {word} {a} and {article(b)}"] if spots == SIDE_BY_SIDE else []))
    if silent:
        background = writer.unnamed(one, two)
    return writer.scene(place(writer, (first, second), style, hues, spots), background), writer.finish(core + ("" if silent else writer.on_background(phrase)))


def several(writer):
    """Two to four of one thing, or three different things."""
    r, items = writer.random, writer.library.items
    first, second, style = writer.pick_pair()
    third = writer.pick()
    background, phrase = writer.background(items[first], items[second], items[third])
    if style in items[third]["ids"] and third not in (first, second) and r.random() < .4:
        things, hues, spots = (first, second, third), (None,) * 3, PYRAMID
        a, b, c = (writer.name(items[k]) for k in things)
        core = r.choice([
            f"{article(a)}, {article(b)} and {article(c)}", f"{article(a)}, {article(b)} and {article(c)}", f"{a}, {b} and {c}",
            f"{article(a)} above {article(b)} and {article(c)}", f"{article(b)} and {article(c)} below {article(a)}",
            f"{article(a)} at the top, {article(b)} at the bottom left and {article(c)} at the bottom right",
        ])
    else:
        count = r.choice((2, 2, 3, 3, 4))
        hue = writer.hue(items[first], style, .2)
        things, hues, spots = (first,) * count, (hue,) * count, {2: SIDE_BY_SIDE, 3: PYRAMID, 4: QUARTERS}[count]
        core = f"{r.choice(NUMBERS[count])} {plural(writer.name(items[first], hue))}"
        second = third = first
    if style != writer.default_style(*(items[k] for k in things)) or r.random() < .35:
        core = named_style(writer, core, style)
    silent = r.random() < .3
    if silent:
        background = writer.unnamed(*(items[k] for k in things))
    return writer.scene(place(writer, things, style, hues, spots), background), writer.finish(core + ("" if silent else writer.on_background(phrase)))


def landscape(writer):
    """One or two things in front of sky and ground."""
    r, items = writer.random, writer.library.items
    first, second, style = writer.pick_pair()
    kind, sky, ground, phrases = r.choice(LANDSCAPES)
    if any((items[k]["hex"], "bg", colour) in HELD_OUT for k in (first, second) for colour in (sky, ground)):
        return landscape(writer)
    colours = [v / 255 for colour in (sky, ground) for v in COLOURS[colour]]
    background = [(NIGHT if kind == "night" else LAND) + HORIZON] + colours
    alone = r.random() < .75
    hue = writer.hue(items[first], style, .15)
    core = article(writer.name(items[first], hue))
    objects = [writer.object(first, style, hue, LARGE, 0, .0625)]
    if not alone:
        core += f" and {article(writer.name(items[second]))}"
        objects = place(writer, (first, second), style, (hue, None), [(-.25, .125), (.25, .125)])
    if style != writer.default_style(*(items[k] for k in ((first,) if alone else (first, second)))) or r.random() < .35:
        core = r.choice([named_style(writer, core, style), f"a {r.choice(STYLE_WORDS[style])} {core.removeprefix('a ').removeprefix('an ')}"])
    return writer.scene(objects, background), writer.finish(f"{core} {r.choice(phrases)}")


def effect(writer):
    r, items = writer.random, writer.library.items
    index = writer.pick()
    item = items[index]
    style = r.choice(list(item["ids"])) if r.random() < .5 else writer.default_style(item)
    kind = r.choice((SILHOUETTE, PIXELS, PIXELS, 1))
    background, phrase = writer.background(item)
    if kind == SILHOUETTE and sum(background[1:4]) < 1.2:  # black on dark shows nothing
        background, phrase = writer.white, "white"
    thing = dict(writer.object(index, style, None, .85, 0, 0), effect=kind)
    core = r.choice(EFFECTS[kind]).format(article(writer.name(item)))
    if style != writer.default_style(item):
        core = named_style(writer, core, style)
    return writer.scene([thing], background), writer.finish(core.replace("pixel art a ", "pixel art ").replace("pixel art an ", "pixel art ") + writer.on_background(phrase))


def empty(writer):
    """A background alone."""
    r = writer.random
    if r.random() < .5:
        kind, sky, ground, phrases = r.choice(LANDSCAPES)
        colours = [v / 255 for colour in (sky, ground) for v in COLOURS[colour]]
        words = r.choice(phrases).split(" ", 1)[1]
        return writer.scene([], [(NIGHT if kind == "night" else LAND) + HORIZON] + colours), writer.finish(r.choice([words, f"a picture of {words}", f"just {words}"]))
    background, phrase = writer.background()
    phrase = phrase if "background" in phrase else phrase + " background"
    return writer.scene([], background), writer.finish(r.choice([article(phrase), phrase, f"nothing but {article(phrase)}", f"an empty {phrase}"]))

