"""Text-to-image scenes other than a lone object: two to four things, landscapes, effects, emoji characters, backgrounds alone.

Every function takes a `captions.Writer` and returns (scene, caption). All things of a group have the same size and stand in the
halves or quarters of the image, so that what is learnt for one arrangement serves all.
"""

from names import COLOURS, HELD_OUT, LANDSCAPES, STYLE_WORDS

HALF = .46
LAND, NIGHT = 6, 7  # kinds of background; their fraction moves the horizon, which no caption names
HORIZONS = (.1, .3, .5, .7, .9)
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
UNCHANGED_IN_PLURAL = ("fish", "sheep", "deer", "squid", "octopus")


def article(words):
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


def two_objects(writer):
    r, items = writer.random, writer.library.items
    first, second, style = writer.pick_pair()
    one, two = items[first], items[second]
    hues = writer.hue(one, style, .12), writer.hue(two, style, .12)
    background, phrase = writer.background(one, two)
    a, b = writer.name(one, hues[0]), writer.name(two, hues[1])
    word = r.choice(STYLE_WORDS[style])
    silent = r.random() < .2
    if r.random() < .25:
        spots = STACKED
        core = r.choice([
            f"{article(a)} above {article(b)}", f"{article(a)} over {article(b)}", f"{article(a)} at the top and {article(b)} at the bottom",
            f"{article(b)} below {article(a)}", f"{article(b)} under {article(a)}", f"{article(b)} underneath {article(a)}",
        ])
        core = named_style(writer, core, style)
    else:
        spots = SIDE_BY_SIDE
        core = r.choice([
            f"{article(a)} and {article(b)}", f"{article(a)} and {article(b)}", f"{article(a)} next to {article(b)}",
            f"{article(a)} to the left of {article(b)}", f"{article(b)} to the right of {article(a)}", f"{a} and {b}", f"{article(a)} with {article(b)}",
            f"{article(a)} on the left and {article(b)} on the right", f"{article(b)} on the right and {article(a)} on the left",
            f"{article(a)} together with {article(b)}", f"{article(a)} beside {article(b)}",
        ])
        if style == "flat" or r.random() < .6:
            core = r.choice([named_style(writer, core, style)] * 3 + [f"a {word} {a} and a {word} {b}", f"{word} {a} and {b}", f"a {word} {a} and {article(b)}"])
    if silent and r.random() < .6:
        background = writer.white
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
    if style == "flat" or r.random() < .6:
        core = named_style(writer, core, style)
    return writer.scene(place(writer, things, style, hues, spots), background), writer.finish(core + writer.on_background(phrase))


def landscape(writer):
    """One or two things in front of sky and ground."""
    r, items = writer.random, writer.library.items
    first, second, style = writer.pick_pair()
    kind, sky, ground, phrases = r.choice(LANDSCAPES)
    if any((items[k]["hex"], "bg", colour) in HELD_OUT for k in (first, second) for colour in (sky, ground)):
        return landscape(writer)
    colours = [v / 255 for colour in (sky, ground) for v in COLOURS[colour]]
    background = [(NIGHT if kind == "night" else LAND) + r.choice(HORIZONS)] + colours
    alone = r.random() < .75
    hue = writer.hue(items[first], style, .15)
    core = article(writer.name(items[first], hue))
    flip = writer.may_flip(items[first]) and r.random() < .35
    objects = [writer.object(first, style, hue, .62, 0, .0625, int(flip))]
    if not alone:
        core += f" and {article(writer.name(items[second]))}"
        objects = place(writer, (first, second), style, (hue, None), [(-.25, .125), (.25, .125)])
    if style == "flat" or r.random() < .6:
        core = r.choice([named_style(writer, core, style), f"a {r.choice(STYLE_WORDS[style])} {core.split(' ', 1)[1]}"])
    return writer.scene(objects, background), writer.finish(f"{core} {r.choice(phrases)}")


def effect(writer):
    r, items = writer.random, writer.library.items
    index = writer.pick()
    item = items[index]
    style = r.choice(list(item["ids"]))
    kind = r.choice((SILHOUETTE, PIXELS, PIXELS, 1))
    background, phrase = writer.background(item)
    if kind == SILHOUETTE and sum(background[1:4]) < 1.2:  # black on dark shows nothing
        background, phrase = writer.white, "white"
    thing = dict(writer.object(index, style, None, .85, 0, 0), effect=kind)
    core = r.choice(EFFECTS[kind]).format(article(writer.name(item)))
    return writer.scene([thing], background), writer.finish(core.replace("pixel art a ", "pixel art ").replace("pixel art an ", "pixel art ") + writer.on_background(phrase))


def empty(writer):
    """A background alone."""
    r = writer.random
    if r.random() < .5:
        kind, sky, ground, phrases = r.choice(LANDSCAPES)
        colours = [v / 255 for colour in (sky, ground) for v in COLOURS[colour]]
        words = r.choice(phrases).split(" ", 1)[1]
        return writer.scene([], [(NIGHT if kind == "night" else LAND) + r.choice(HORIZONS)] + colours), writer.finish(r.choice([words, f"a picture of {words}", f"just {words}"]))
    background, phrase = writer.background()
    phrase = phrase if "background" in phrase else phrase + " background"
    return writer.scene([], background), writer.finish(r.choice([article(phrase), phrase, f"nothing but {article(phrase)}", f"an empty {phrase}"]))


def characters(item, r):
    """Returns the emoji itself, with or without the selector that keyboards add."""
    text = "".join(chr(int(code, 16)) for code in item["hex"].split("-"))
    return text + ("\ufe0f" if len(text) == 1 and ord(text) < 0x1f000 and r.random() < .6 else "")


def emoji(writer):
    """The emoji character as the prompt."""
    r, items = writer.random, writer.library.items
    first, second, style = writer.pick_pair()
    background, phrase = writer.background(items[first], items[second])
    named = r.random() < .45
    style = style if named or "3d" not in items[first]["ids"] or "3d" not in items[second]["ids"] else "3d"
    silent = r.random() < .5
    if silent and r.random() < .8:
        background = writer.white
    mark = characters(items[first], r)
    if r.random() < .15:
        core, objects = mark + r.choice(["", " ", " and "]) + characters(items[second], r), place(writer, (first, second), style, (None, None), SIDE_BY_SIDE)
    else:
        core, objects = r.choice([mark, mark, mark, f"a {mark}", f"{mark} emoji", f"the emoji {mark}"]), [writer.object(first, style, None, .85, 0, 0)]
    if named:
        core = r.choice([f"{r.choice(STYLE_WORDS[style])} {core}", f"{core} in {r.choice(STYLE_WORDS[style])} style"])
    return writer.scene(objects, background), core + ("" if silent else writer.on_background(phrase))
