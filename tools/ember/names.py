"""Everyday words for emoji whose official names nobody types, and the colour vocabulary."""

# official label -> words people use
EXTRA_NAMES = {
    "cat face": ["cat", "kitty", "happy cat", "cat head"], "cat": ["cat", "kitten", "walking cat", "whole cat"],
    "dog face": ["dog", "happy dog", "puppy", "dog head"], "dog": ["dog", "walking dog", "whole dog"],
    "rabbit face": ["rabbit", "bunny", "happy rabbit"], "mouse face": ["mouse"], "tiger face": ["tiger"], "horse face": ["horse"],
    "cow face": ["cow"], "pig face": ["pig", "happy pig"], "monkey face": ["monkey"], "lion": ["lion head", "lion face"],
    "bear": ["teddy bear head", "brown bear"], "panda": ["panda bear", "panda face"], "frog": ["frog face", "happy frog"],
    "chicken": ["hen"], "penguin": ["happy penguin", "cute penguin"], "owl": ["owl bird"], "spouting whale": ["happy whale"], "whale": ["blue whale"],
    "fish": ["sea fish"], "tropical fish": ["colorful fish", "striped fish"], "snake": ["green snake"], "turtle": ["tortoise"], "lady beetle": ["ladybug", "ladybird"],
    "honeybee": ["bee"], "automobile": ["car", "red car", "auto"], "sport utility vehicle": ["suv", "blue car", "big car"], "racing car": ["race car", "formula car"],
    "delivery truck": ["truck", "van"], "articulated lorry": ["lorry", "big truck"], "bus": ["city bus"], "locomotive": ["steam train"], "bicycle": ["bike"],
    "motorcycle": ["motorbike"], "airplane": ["plane", "aeroplane", "jet"], "sailboat": ["boat", "sailing boat"], "ship": ["big ship"], "balloon": ["red balloon", "hot air balloon", "party balloon"],
    "house": ["home", "small house"], "house with garden": ["home with a tree"], "castle": ["old castle"], "deciduous tree": ["tree", "green tree", "leafy tree"],
    "evergreen tree": ["pine tree", "fir tree"], "christmas tree": ["decorated tree"], "hot beverage": ["coffee", "coffee cup", "cup of coffee", "cup of tea", "mug"],
    "teacup without handle": ["tea cup", "green tea"], "birthday cake": ["cake", "cake with candles"], "shortcake": ["slice of cake", "piece of cake"], "soccer ball": ["football", "ball"],
    "american football": ["rugby style ball"], "red apple": ["apple"], "pear": ["green pear"], "tangerine": ["orange fruit", "mandarin"], "grapes": ["bunch of grapes"],
    "cherries": ["cherry"], "hamburger": ["burger", "cheeseburger"], "french fries": ["fries", "chips"], "pizza": ["slice of pizza", "pizza slice"], "doughnut": ["donut"],
    "soft ice cream": ["ice cream cone", "ice cream"], "ice cream": ["bowl of ice cream"], "bread": ["loaf of bread"], "cooking": ["fried egg"], "egg": ["white egg"],
    "gem stone": ["diamond", "gem", "jewel"], "crown": ["golden crown", "king's crown"], "red heart": ["heart"], "star": ["yellow star", "gold star"], "sun": ["bright sun"],
    "crescent moon": ["moon"], "full moon": ["round moon"], "globe showing americas": ["earth", "planet earth"],
    "ringed planet": ["saturn", "planet with rings"], "cloud": ["white cloud"], "rainbow": ["colorful rainbow"], "fire": ["flame", "campfire"], "droplet": ["water drop", "drop of water"],
    "snowman without snow": ["snowman"], "umbrella": ["open umbrella"], "thumbs up": ["thumb up", "like sign"], "thumbs down": ["thumb down", "dislike sign"],
    "grinning face": ["happy face", "smiley"], "smiling face with sunglasses": ["cool face", "face with sunglasses"], "loudly crying face": ["sad crying face", "sobbing face"],
    "crying face": ["sad face with a tear", "sad face"], "angry face": ["mad face"], "face with tears of joy": ["laughing face"], "sleeping face": ["sleepy face with zzz"],
    "pile of poo": ["poop"], "jack-o-lantern": ["halloween pumpkin", "pumpkin"], "ghost": ["white ghost", "spooky ghost"], "robot": ["robot head", "android robot"],
    "mobile phone": ["phone", "smartphone"], "laptop": ["notebook computer", "computer"], "desktop computer": ["pc", "computer screen"], "keyboard": ["computer keyboard"],
    "camera": ["photo camera"], "television": ["tv", "tv set"], "light bulb": ["lamp", "bulb"], "books": ["stack of books"], "open book": ["reading book"], "pencil": ["yellow pencil"],
    "wrapped gift": ["gift", "present", "gift box"], "key": ["golden key"], "locked": ["padlock"], "hammer": ["claw hammer"], "magnifying glass tilted left": ["magnifying glass"],
    "alarm clock": ["clock"], "watch": ["wrist watch"], "money bag": ["bag of money"], "coin": ["gold coin"], "envelope": ["letter", "mail"], "chair": ["wooden chair"], "couch and lamp": ["sofa", "couch"],
    "t-shirt": ["shirt", "tee"], "running shoe": ["sneaker", "shoe"], "top hat": ["black hat", "hat"], "backpack": ["school bag", "rucksack"], "crossed swords": ["swords"],
    "guitar": ["electric guitar"], "musical keyboard": ["piano"], "musical note": ["music note"], "game die": ["dice", "die"], "video game": ["game controller", "gamepad"],
    "trophy": ["golden cup", "prize cup"], "bullseye": ["target", "dart board"], "sushi": ["salmon sushi"], "steaming bowl": ["ramen", "noodle soup", "bowl of noodles"],
    "rose": ["red rose", "flower"], "tulip": ["pink tulip", "flower"], "sunflower": ["yellow flower"], "hibiscus": ["red flower"], "cherry blossom": ["pink flower", "blossom"],
    "four leaf clover": ["lucky clover", "clover"], "mushroom": ["red mushroom", "toadstool"], "cactus": ["green cactus"], "palm tree": ["tropical tree"], "mountain": ["rocky mountain"],
    "volcano": ["erupting volcano"], "dragon": ["whole dragon"], "dragon face": ["dragon head", "green dragon"], "unicorn": ["unicorn head"], "t-rex": ["dinosaur", "tyrannosaurus"],
    "man": ["guy", "man's face"], "woman": ["lady", "woman's face"], "boy": ["young boy"], "girl": ["young girl"], "baby": ["little baby"], "rocket": ["space rocket", "spaceship"],
}

# official label -> more words, of plain typing: synonyms, young animals, moods that have a picture
SYNONYMS = {
    "dog face": ["pup", "doggy", "cute dog", "smiling dog"], "dog": ["hound"], "cat face": ["kitty cat", "cute cat", "kitten face"], "cat": ["house cat"],
    "grinning cat": ["smiling cat", "happy cat face"], "crying cat": ["sad cat", "cat crying"], "pouting cat": ["angry cat", "mad cat"], "smiling cat with heart-eyes": ["cat in love"],
    "cat with tears of joy": ["laughing cat"], "weary cat": ["scared cat", "tired cat"], "kissing cat": ["cat kissing"], "black cat": ["dark cat"],
    "rabbit face": ["bunny face", "bunny rabbit", "hare"], "mouse face": ["little mouse"], "hamster": ["guinea pig"], "cow face": ["happy cow"], "ox": ["bull"], "goat": ["billy goat"],
    "ewe": ["sheep", "lamb"], "monkey face": ["ape face", "happy monkey"], "gorilla": ["ape"], "horse face": ["pony"], "horse": ["running horse", "stallion"],
    "pig": ["whole pig"], "pig face": ["piglet", "smiling pig"], "boar": ["wild boar", "wild pig"], "chicken": ["chicken head"], "rooster": ["cock"], "hatching chick": ["chick in an egg"],
    "baby chick": ["chick", "baby bird"], "bird": ["blue bird", "small bird", "robin"], "black bird": ["crow", "raven"], "eagle": ["hawk", "falcon"], "duck": ["mallard", "duckling"],
    "parrot": ["colorful bird"], "frog": ["toad"], "crocodile": ["alligator"], "lizard": ["gecko"], "sauropod": ["brontosaurus", "long neck dinosaur"], "t-rex": ["trex", "dino"],
    "spouting whale": ["smiling whale"], "octopus": ["kraken"], "spiral shell": ["shell", "seashell"], "shrimp": ["prawn"], "bug": ["caterpillar"], "cricket": ["grasshopper"],
    "spider web": ["cobweb", "web"], "fly": ["house fly"], "worm": ["earthworm"], "paw prints": ["paw", "paws"], "bear": ["grizzly"], "koala": ["koala bear"], "wolf": ["wolf head"],
    "automobile": ["vehicle", "motorcar", "auto car"], "articulated lorry": ["semi truck", "tractor trailer"], "delivery truck": ["delivery van", "box truck"], "pickup truck": ["pickup", "pick up"],
    "fire engine": ["fire truck", "firetruck"], "police car": ["cop car"], "taxi": ["cab", "yellow cab"], "bicycle": ["push bike"], "motor scooter": ["scooter", "vespa", "moped"],
    "high-speed train": ["fast train"], "locomotive": ["steam engine", "old train"], "train": ["subway train"], "bullet train": ["white train"], "tram": ["streetcar"], "airplane": ["air plane", "aircraft", "passenger plane"],
    "small airplane": ["propeller plane"], "helicopter": ["chopper"], "flying saucer": ["ufo", "alien ship"], "rocket": ["space ship", "rocket ship"], "satellite": ["space satellite"], "canoe": ["rowing boat", "row boat"],
    "speedboat": ["motorboat", "fast boat"], "passenger ship": ["cruise ship"], "ship": ["ocean liner", "vessel"], "parachute": ["hang glider"],
    "house": ["cottage", "little house"], "houses": ["village"], "derelict house": ["haunted house", "old house"], "office building": ["skyscraper", "tower block"], "castle": ["fairy tale castle"], "hut": ["cabin"],
    "tent": ["camping tent"], "church": ["chapel"], "statue of liberty": ["liberty statue"], "ferris wheel": ["big wheel"], "fountain": ["water fountain"], "factory": ["plant with chimneys"],
    "mountain": ["rocky peak"], "snow-capped mountain": ["snowy mountain"], "desert island": ["island", "tropical island"], "sun with face": ["smiling sun", "happy sun"], "full moon face": ["smiling moon", "moon face"],
    "glowing star": ["shiny star", "sparkling star"], "shooting star": ["falling star"], "cloud with rain": ["rain cloud", "rainy cloud", "rain"], "cloud with lightning": ["thunder cloud", "storm cloud"], "cloud with snow": ["snow cloud"],
    "high voltage": ["lightning", "lightning bolt", "thunderbolt"], "snowflake": ["flake of snow"], "water wave": ["wave", "ocean wave"], "globe showing europe-africa": ["globe", "world"], "milky way": ["galaxy"], "sun behind cloud": ["sun and cloud"],
    "evergreen tree": ["conifer", "spruce"], "deciduous tree": ["big tree", "oak tree"], "potted plant": ["house plant", "plant", "plant in a pot"], "seedling": ["sprout"], "blossom": ["daisy", "yellow blossom"], "bouquet": ["bunch of flowers", "flowers"],
    "maple leaf": ["red leaf"], "fallen leaf": ["brown leaf", "autumn leaf"], "herb": ["leaves", "green leaf", "leaf"], "mushroom": ["fly agaric"], "cactus": ["desert plant"],
    "red apple": ["shiny apple"], "tangerine": ["orange", "clementine"], "ear of corn": ["corn", "corn cob", "maize"], "hot pepper": ["chili", "chilli pepper"], "eggplant": ["aubergine"], "leafy green": ["lettuce", "salad leaf"],
    "potato": ["spud"], "cheese wedge": ["cheese", "piece of cheese"], "meat on bone": ["meat"], "poultry leg": ["chicken leg", "drumstick"], "cut of meat": ["steak"], "hot dog": ["hotdog"], "cooking": ["egg in a pan"], "spaghetti": ["pasta", "noodles"],
    "baguette bread": ["baguette", "french bread"], "bread": ["toast", "white bread"], "pancakes": ["stack of pancakes"], "cookie": ["biscuit", "chocolate chip cookie"], "cupcake": ["muffin"], "chocolate bar": ["chocolate"], "candy": ["sweet", "bonbon"],
    "custard": ["pudding", "flan"], "honey pot": ["honey", "jar of honey"], "glass of milk": ["milk"], "hot beverage": ["tea", "hot coffee", "hot drink", "cocoa"], "beer mug": ["beer", "glass of beer"], "wine glass": ["wine", "glass of wine"], "tropical drink": ["fruit cocktail"],
    "cup with straw": ["soda", "soft drink", "lemonade"], "bottle with popping cork": ["champagne", "bottle of champagne"], "baby bottle": ["milk bottle"], "kitchen knife": ["knife"], "fork and knife": ["cutlery", "knife and fork"], "popcorn": ["bag of popcorn"],
    "steaming bowl": ["soup", "bowl of soup"], "green salad": ["salad", "bowl of salad"], "cooked rice": ["rice", "bowl of rice"], "french fries": ["potato fries"], "soft ice cream": ["icecream", "soft serve"], "doughnut": ["pink donut"], "birthday cake": ["party cake"],
    "mobile phone": ["cell phone", "cellphone", "iphone"], "telephone": ["old phone"], "laptop": ["laptop computer"], "desktop computer": ["monitor"], "computer mouse": ["pc mouse"], "television": ["telly"], "video game": ["playstation controller"],
    "light bulb": ["lightbulb"], "wrapped gift": ["birthday present"], "locked": ["lock", "closed lock"], "key": ["house key"], "magnifying glass tilted left": ["loupe", "magnifier"], "scissors": ["pair of scissors"], "books": ["pile of books"],
    "closed book": ["book", "red book"], "newspaper": ["paper"], "memo": ["note"], "pen": ["ballpoint pen"], "paintbrush": ["brush", "paint brush"], "artist palette": ["paint palette", "palette"], "money bag": ["sack of money"], "dollar banknote": ["money", "dollars", "cash"],
    "glasses": ["pair of glasses", "spectacles", "eyeglasses"], "sunglasses": ["shades", "dark glasses"], "top hat": ["cylinder hat"], "billed cap": ["cap", "baseball cap"], "woman's hat": ["sun hat", "straw hat", "summer hat"], "graduation cap": ["mortarboard"],
    "crown": ["gold crown", "royal crown"], "t-shirt": ["tshirt"], "jeans": ["trousers", "pants", "blue jeans"], "dress": ["blue dress"], "socks": ["pair of socks"], "gloves": ["mittens"], "running shoe": ["trainer", "sports shoe"], "high-heeled shoe": ["high heel"],
    "woman's boot": ["boot"], "handbag": ["lady's bag"], "ring": ["diamond ring", "wedding ring"], "gem stone": ["blue diamond", "crystal"], "umbrella with rain drops": ["umbrella in the rain"], "bathtub": ["bath", "bath tub"], "couch and lamp": ["living room"],
    "package": ["box", "parcel", "cardboard box"], "basket": ["wicker basket"], "bucket": ["pail"], "balloon": ["air balloon", "toy balloon"], "teddy bear": ["teddy", "stuffed bear"], "soccer ball": ["soccer"], "basketball": ["basket ball"], "game die": ["cube with dots"],
    "musical keyboard": ["keyboard piano"], "drum": ["snare drum"], "violin": ["fiddle"], "trumpet": ["bugle"], "headphone": ["headphones"], "microphone": ["mic"], "alarm clock": ["red clock"], "crossed swords": ["two swords"], "dagger": ["sword", "blade"], "bow and arrow": ["bow"],
    "hammer": ["mallet"], "wrench": ["spanner"], "screwdriver": ["screw driver"], "carpentry saw": ["saw"], "axe": ["hatchet"], "bomb": ["cartoon bomb"], "candle": ["burning candle"], "jack-o-lantern": ["carved pumpkin"], "skull": ["death's head"], "alien": ["grey alien", "et"],
    "baby": ["infant face"], "old man": ["grandpa", "grandfather"], "old woman": ["grandma", "grandmother"], "prince": ["young king"], "princess": ["young queen"], "mage": ["wizard", "sorcerer"], "santa claus": ["santa", "father christmas"], "astronaut": ["spaceman"],
    "cook": ["chef"], "detective": ["spy", "sherlock"], "superhero": ["hero"], "mermaid": ["sea maid"], "police officer": ["policeman", "cop"], "firefighter": ["fireman"], "health worker": ["doctor"], "teacher": ["school teacher"], "farmer": ["gardener"], "ninja": ["ninja warrior"],
    "smiling face with smiling eyes": ["blushing face", "smile"], "grinning face": ["smiling face emoji", "happy smiley"], "face with tears of joy": ["crying laughing face"], "smiling face with heart-eyes": ["face in love", "heart eyes"],
    "winking face": ["wink", "winking smiley"], "crying face": ["sad smiley"], "angry face": ["angry smiley"], "enraged face": ["red angry face", "furious face"], "astonished face": ["surprised face", "shocked face"], "fearful face": ["scared face", "frightened face"],
    "sleeping face": ["asleep face", "face sleeping"], "face with medical mask": ["face with a mask", "masked face"], "nauseated face": ["sick face", "green face"], "thinking face": ["face thinking"], "clown face": ["clown"], "nerd face": ["nerd"], "cowboy hat face": ["cowboy"],
    "partying face": ["party face"], "star-struck": ["face with star eyes"], "exploding head": ["mind blown"], "hot face": ["sweating face"], "cold face": ["freezing face"], "smiling face with horns": ["devil", "little devil"], "smiling face with halo": ["angel face"],
}

# worn on the head, and over the eyes
HATS = ("top hat", "crown", "woman's hat", "graduation cap", "billed cap", "rescue worker's helmet", "military helmet")
EYEWEAR = ("sunglasses", "glasses", "goggles")
HAT_WORDS = ("hat", "nice hat", "funny hat")  # of the first

# colour -> rgb
COLOURS = {
    "white": (255, 255, 255), "black": (18, 18, 20), "grey": (140, 140, 145), "red": (220, 45, 45), "orange": (245, 140, 40), "yellow": (250, 215, 60),
    "green": (60, 170, 80), "teal": (30, 150, 145), "cyan": (90, 215, 235), "blue": (50, 105, 225), "navy": (25, 40, 95), "purple": (130, 70, 200),
    "pink": (245, 150, 190), "magenta": (220, 50, 160), "brown": (125, 80, 50), "beige": (235, 220, 190), "light blue": (165, 210, 250),
    "light green": (170, 230, 165), "lavender": (205, 190, 245), "light grey": (215, 215, 220), "dark green": (20, 80, 45), "dark red": (120, 20, 30),
    "dark grey": (65, 65, 70), "dark purple": (65, 30, 105), "mint": (175, 240, 210), "peach": (255, 205, 170), "gold": (215, 170, 50), "turquoise": (60, 205, 190),
}
COLOUR_ALIASES = {
    "grey": ["grey", "gray"], "light grey": ["light grey", "light gray"], "dark grey": ["dark grey", "dark gray"],
    "light blue": ["light blue", "sky blue", "pale blue", "pastel blue"], "light green": ["light green", "lime green", "pale green"],
    "lavender": ["lavender", "light purple", "pastel purple"], "navy": ["navy", "dark blue", "navy blue"], "dark red": ["dark red", "maroon"],
    "purple": ["purple", "violet"], "blue": ["blue", "bright blue"], "beige": ["beige", "cream"], "pink": ["pink", "light pink"], "magenta": ["magenta", "hot pink"],
}
BASIC_COLOURS = ("white", "black", "grey", "red", "orange", "yellow", "green", "teal", "cyan", "blue", "navy", "purple", "pink", "brown")
# hue of recoloured objects, in degrees
HUES = {"red": 0, "orange": 28, "yellow": 50, "green": 128, "teal": 176, "blue": 217, "purple": 270, "pink": 325}
COLOUR_WORDS = frozenset("red orange yellow green teal blue purple pink brown black white grey gray".split())
ADJECTIVES = ("happy", "cute", "funny", "nice", "beautiful", "lovely", "simple", "little cute")
STYLE_WORDS = {
    "3d": ("3d", "3d", "3d", "3d", "3d rendered", "glossy 3d", "shiny 3d"),
    "flat": ("flat", "flat", "flat", "flat", "flat vector", "simple flat", "2d"),
}

# kind, sky, ground, phrases
LANDSCAPES = (
    ("day", "light blue", "green", ("on a meadow", "on green grass", "on a green meadow under a blue sky", "in a green field", "on a grassy hill")),
    ("day", "light blue", "peach", ("on a beach", "on the sand under a blue sky", "on a sandy beach")),
    ("day", "light blue", "white", ("in the snow", "on snow", "on a snowy field", "in a winter landscape")),
    ("day", "peach", "gold", ("in the desert", "on a desert dune", "in a sandy desert")),
    ("day", "light blue", "blue", ("on the sea", "on the water", "on the ocean", "on a blue sea")),
    ("day", "light blue", "dark grey", ("on a road", "on the street", "on a grey road")),
    ("day", "orange", "dark purple", ("at sunset", "in front of a sunset", "in the evening light")),
    ("night", "navy", "dark green", ("at night", "under the stars", "on a hill at night", "under a starry sky")),
    ("night", "black", "black", ("in space", "in outer space", "among the stars")),
)

# Never rendered in training: (hexcode, "bg" or "hue", colour). Used to measure unseen pairs.
HELD_OUT = frozenset({
    ("1F49A", "bg", "yellow"), ("1F680", "bg", "pink"), ("1F431", "bg", "purple"), ("1F419", "bg", "green"),
    ("1F3B8", "bg", "cyan"), ("1F33B", "bg", "black"), ("1F98B", "bg", "orange"), ("1F697", "bg", "teal"),
    ("1F34E", "hue", "purple"), ("1F436", "hue", "green"), ("1F697", "hue", "pink"), ("1F419", "hue", "blue"), ("1F981", "hue", "blue"),
    ("2764", "hue", "teal"), ("1F355", "hue", "green"), ("1F3E0", "hue", "purple"), ("1F34C", "hue", "blue"), ("1F438", "hue", "orange"),
    ("1F353", "hue", "blue"), ("1F98B", "hue", "green"), ("1F680", "hue", "green"), ("1F388", "hue", "purple"), ("1F40B", "hue", "pink"),
    ("1F951", "hue", "purple"), ("1F3BA", "hue", "blue"), ("1F383", "hue", "teal"), ("1F451", "hue", "pink"), ("1F986", "hue", "purple"),
})
