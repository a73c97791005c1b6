"""The plots: each tells a story about a `World` as paragraphs, and notes the facts that can be asked for."""

from __future__ import annotations

from collections.abc import Callable

from training.lexicon import Draw
from training.stories import TIMES, Being, Story, World, way_of

Plot = Callable[[World], list[list[str]]]


def opening(w: World) -> list[str]:
    """Who and where."""
    first = w.tell(
        "Once upon a time there was {atrait} named {h}.",
        "Once upon a time, in a little house near the {place}, lived {akind} named {h}.",
        "There was once {akind} named {h}, who lived near the {place}.",
        "Near the {place} lived {akind} named {h}.",
        "Not far from the {place} lived {atrait} named {h}.",
        "Once there was {akind} named {h}.",
        "Long ago, {akind} named {h} lived by the {place}.",
        "In a small house by the {place} lived {akind} named {h}.",
    )
    w.fact("Who is the story about?", "It is about {akind} named {h}.")
    says_trait = w.words["trait"] not in first
    second = w.tell(
        "{He} was {trait}, and everyone liked {him}." if says_trait else "Everyone liked {him}.",
        "Everyone said that {h} was {trait}." if says_trait else "{He} laughed a lot and sang even more.",
        "{h} loved {food} more than anything.",
        "{His} best friend was {afkind} named {f}.",
        "Every day {he} played with {his} friend {f}, {afkind}.",
        "{He} had one good friend, {afkind} named {f}.",
    )
    return [first, second]


def knows_friend(w: World) -> str:
    """Introduces the friend where the opening has not."""
    if any("{f}" in option for option in w.used):
        return ""
    return w.tell(
        "{His} best friend was {afkind} named {f}.",
        "{His} neighbour was {afkind} named {f}.",
        "Next door lived {afkind} named {f}.",
        "{h} had a friend, {afkind} named {f}.",
    )


def ending(w: World) -> list[str]:
    return [
        w.tell(
            "In the evening they ate {food} together and laughed about the day.",
            "Then they went home and had {food} for supper.",
            "That night {h} fell asleep with a smile.",
            "From that day on, {h} and {f} were the best of friends.",
            "They sat by the fire until the moon came up, and {f} told a funny story.",
            "And whenever {h} thought of that day, {he} had to smile.",
            "{h} went to bed tired and happy.",
            "And so the day ended well for both of them.",
        ),
        *(
            [
                w.tell(
                    "It had been a good day.",
                    "What a day it had been!",
                    "And that is the end of the story.",
                    "The end.",
                )
            ]
            if w.draw.chance(0.5)
            else []
        ),
    ]


def thanks(w: World) -> str:
    return w.tell(
        '"Thank you, {f}," said {h}. "You are a true friend."',
        '"I could not have done it without you," {h} told {f}.',
        "{h} thanked {f} again and again.",
        '"Thank you!" cried {h}, and {f} smiled.',
        '"That was very kind of you," said {h}. {f} only laughed.',
        '{h} hugged {f}. "Thank you for helping me," {he} said.',
    )


def lost(w: World) -> list[list[str]]:
    way = way_of(w.thing)
    w.words["cause"] = {
        "rolls": w.draw.pick(("rolled away", "rolled down the hill", "rolled under the old bridge")),
        "flies": w.draw.pick(("was blown away by the wind", "flew off in the wind")),
        "shines": w.draw.pick(
            ("was taken by a magpie that loves shiny things", "fell out of a hole in the pocket")
        ),
        "lies": w.draw.pick(("was left behind", "was forgotten in the rain", "slipped off the cart")),
    }[way]
    w.words["where"] = {
        "rolls": w.draw.pick(("behind a big stone", "in the tall grass", "between two roots")),
        "flies": w.draw.pick(("high up in a tree", "on the roof of the mill", "in a thorn bush")),
        "shines": w.draw.pick(
            ("in a nest in the old oak", "at the bottom of the well", "under the dry leaves")
        ),
        "lies": w.draw.pick(("under a bench", "behind the door", "beside the path", "on a low wall")),
    }[way]
    w.words["time"] = w.draw.pick(TIMES)
    w.fact("What did {h} lose?", "{h} lost {athing}.")
    w.fact("Where was the {noun}?", "The {noun} was {where}.")
    w.fact("Who helped {h}?", "{f} helped {h}.")
    return [
        [*opening(w), w.tell("Of all that {he} owned, {he} loved {his} {thing} most.", "{h} had {athing}, and {he} took it everywhere.", "For {his} birthday {h} had been given {athing}.", "{h} was very proud of {his} {thing}.")],
        [
            w.tell("{time}, the {thing} was gone.", "{time}, {h} could not find the {thing} anywhere.", "But {time_low}, when {h} came to the {other}, the {thing} was missing."),
            w.tell("{He} looked under the bed and behind the chairs.", "{He} looked here and there, but it was nowhere to be seen.", "{He} turned every bag inside out.", "{He} ran back the whole way and looked at every step."),
            w.tell("It was not there, and {h} began to cry.", "Nothing! {h} sat down and felt very sad.", '"Oh no," said {h}. "What shall I do now?"', "{h} was close to tears."),
        ],
        [
            knows_friend(w),
            w.tell("{f} heard {him} and came to see what was wrong.", "Just then {f} came by.", "{f} saw {h} and stopped.", "When {f} heard about it, {fhe} came at once."),
            w.tell('"I have lost my {thing}," said {h}.', '"My {thing} is gone," {h} told {f}.', '"Have you seen my {noun}?" asked {h}.'),
            w.tell('"Do not worry," said {f}. "We will look for it together."', '"Two can see more than one," said {f}. "Let us look in the {other}."', '"Let us think," said {f}. "Where did you have it last?"', '"Come," said {f}, "we will find it before it gets dark."'),
        ],
        [
            w.tell("So they went to the {other} and searched.", "Together they walked to the {other}.", "They followed the path to the {other}."),
            w.tell("It had {plainly}. And there it was, {where}!".replace("{plainly}", "happened like this: the {noun} {cause}"), "The {noun} {cause}, that was all. It was {where}!", "At last {f} pointed with a shout. The {noun} was {where}!", "And then {h} saw it: the {thing} was {where}."),
            w.tell("{f} climbed up carefully and brought it down." if way == "flies" else "{f} pulled it out and brushed off the dust.", "{f} reached it first and gave it to {h}.", "{h} picked it up and held it tight."),
            thanks(w),
        ],
        [w.tell("After that, {h} always took good care of the {noun}.", "{h} never let the {noun} out of {his} sight again.", "Since then the {noun} has its own place on the shelf."), *ending(w)],
    ]  # fmt: skip


def reach(w: World) -> list[list[str]]:
    w.words["obstacle"], w.words["tool"], w.words["how"] = w.draw.pick(
        (
            ("a wide river", "a raft", "built a raft from old planks"),
            ("a high wall", "a ladder", "fetched a long ladder"),
            ("a deep ditch", "a plank", "laid a strong plank across"),
            ("a steep cliff", "a rope", "let down a long rope"),
            ("a thick hedge", "a pair of shears", "cut a little gate into it"),
            ("a dark tunnel", "a torch", "brought a torch and went ahead"),
        )
    )
    w.words["time"] = w.draw.pick(TIMES)
    w.fact("What was in the way?", "There was {obstacle} in the way.")
    w.fact("What did {h} want?", "{h} wanted {athing}.")
    w.fact("How did {f} help?", "{f} {how}.")
    return [
        [*opening(w), w.tell("More than anything, {h} wished for {athing}.", "For a long time {h} had wanted {athing}.", "{h} often dreamed of having {athing}.")],
        [
            w.tell("{time}, {he} heard that there was {athing} in the {other}.", "{time}, a traveller told {him} that {athing} was waiting in the {other}.", "{time}, {he} saw {athing} on the far side of the {other}."),
            w.tell("{h} set out at once.", "{h} put on {his} boots and went.", "Without waiting for breakfast, {h} started to walk."),
            w.tell("But on the way there was {obstacle}.", "But then {he} came to {obstacle}.", "But {obstacle} was in the way."),
            w.tell("{He} tried once, and {he} tried twice, but it was no use.", "{He} tried to get past, but {he} was too small.", "{He} tried everything and got nowhere.", '"I will never get past this," {he} sighed.'),
        ],
        [
            knows_friend(w),
            w.tell("As luck would have it, {f} was nearby.", "{f} was sitting there and had seen it all.", "After a while {f} came along the road.", "{f} heard the sighing and came closer."),
            w.tell('"What is the matter?" asked {f}.', '"Why do you look so sad?" asked {f}.', '"Can I help you?" asked {f}.'),
            w.tell('"I want to get the {thing}, but I cannot get past {obstacle}," said {h}.', '"There is {obstacle}, and behind it is the {thing}," said {h}.'),
            w.tell("{f} thought for a while. Then {fhe} {how}.", '"I have an idea," said {f}, and {fhe} {how}.', "{f} did not say much. {fHe} simply {how}."),
        ],
        [
            w.tell("Now it was easy.", "That was just what they needed.", "And it worked!", "It took some time, but it worked."),
            w.tell("Soon {h} held the {thing} in {his} arms.", "A little later {h} stood before the {thing}.", "On the other side, {h} found the {thing} at once."),
            thanks(w),
            w.tell('"We can share it," said {h}. "It belongs to both of us now."', '"Alone it is only half the fun," said {h}, "so let us share the {noun}."', "And because {h} was {trait}, the two of them shared the {noun}."),
        ],
        ending(w),
    ]  # fmt: skip


def making(w: World) -> list[list[str]]:
    w.words["work"], w.words["need1"], w.words["need2"], w.words["result"] = w.draw.pick(
        (
            ("bake a cake", "flour", "eggs", "cake"),
            ("cook a pot of soup", "carrots", "salt", "soup"),
            ("build a boat", "wood", "nails", "boat"),
            ("build a sledge", "boards", "glue", "sledge"),
            ("plant a flower bed", "seeds", "good soil", "flower bed"),
            ("sew a tent", "cloth", "thread", "tent"),
        )
    )
    w.words["time"] = w.draw.pick(TIMES)
    w.words["time_low"] = w.words["time"].lower().replace("sunday", "Sunday")
    w.fact("What did {h} want to do?", "{h} wanted to {work}.")
    w.fact("Who had the {need2}?", "{f} had the {need2}.")
    w.fact("What did {h} give to {f}?", "{h} gave {f} {athing}.")
    return [
        opening(w),
        [
            w.tell("{time}, {h} decided to {work}.", "{time}, {h} woke up with a plan: {he} would {work}.", "{time}, {h} said, \"Today I will {work}.\""),
            w.tell("For that {he} needed {need1} and {need2}.", "{He} knew that it takes {need1} and {need2}.", '"I need {need1} and {need2}," {he} thought.'),
            w.tell("The {need1} was easy to get at the {place}." if not w.words["need1"].endswith("s") else "The {need1} were easy to get at the {place}.", "{He} found {need1} at home.", "{He} got {need1} at the {place}."),
            w.tell("But there was no {need2} anywhere.", "But {he} had forgotten to get {need2}.", "But where would {he} get {need2}?"),
        ],
        [
            knows_friend(w),
            w.tell("So {h} went to see {f}.", "Then {he} thought of {f} and walked over to the {other}.", "{h} knocked at the door of {f}."),
            w.tell('"Do you have {need2}?" asked {h}. "I want to {work}."', '"I want to {work}," said {h}, "but I have no {need2}."'),
            w.tell('"I do," said {f}. "What will you give me for it?"', '"I have plenty," said {f}. "But I would like something in return."', '"Yes," said {f}, "if I get something nice from you."'),
            w.tell("{h} thought about it and gave {f} {athing}.", "So {h} went home and brought {athing} for {f}.", '"You can have my {thing}," said {h}, and {f} was happy.'),
        ],
        [
            w.tell("Then the two of them set to work.", "Now {he} had everything, and {f} wanted to help.", "{f} came along, and they worked side by side."),
            w.tell("They worked until the sun went down.", "It took the whole afternoon.", "Once it almost went wrong, but {f} was quick.", "It was hard work, but they sang while they did it."),
            w.tell("At last the {result} was ready.", "When evening came, the {result} was finished.", "And then it was done: the finest {result} in the whole valley."),
            w.tell('"It is better than I dreamed," said {h}.', '"We did it!" cried {h}.', "Both of them were proud.", 'Everyone came to see the {result}.'),
        ],
        ending(w),
    ]  # fmt: skip


def fear(w: World) -> list[list[str]]:
    w.words["fear"], w.words["noise"], w.words["truth"] = w.draw.pick(
        (
            ("the dark", "something scratched at the window", "only a branch in the wind"),
            (
                "thunder",
                "there was a loud rumble outside",
                "only an empty barrel that rolled across the yard",
            ),
            ("ghosts", "something white moved behind the trees", "only a sheet on the washing line"),
            ("wolves", "there was a long howl outside", "only the wind in the chimney"),
            ("the old cellar", "something knocked below the floor", "only a shutter that was loose"),
        )
    )
    w.words["time"] = w.draw.pick(("One night", "Late one evening", "One stormy night", "One dark evening"))
    w.fact("What was {h} afraid of?", "{h} was afraid of {fear}.")
    w.fact("What was it really?", "It was {truth}.")
    w.fact("What did they take along?", "They took {athing} along.")
    return [
        [*opening(w), w.tell("But {h} was afraid of {fear}.", "There was only one thing: {h} was afraid of {fear}.", "Nobody knew that {h} was afraid of {fear}.")],
        [
            w.tell("{time}, {noise}.", "{time}, when {he} was already in bed, {noise}.", "{time}, {noise}, and {h} sat up at once."),
            w.tell("{h} pulled the blanket over {his} head.", "{h} held {his} breath and listened.", "{His} heart beat fast.", "{h} did not dare to move."),
            w.tell("There it was again!", "A little later it came back.", "Then it was quiet, and then it began again."),
        ],
        [
            knows_friend(w),
            w.tell("In the end {he} ran over to {f}.", "{He} called for {f}, who was staying for the night.", "Luckily {f} was there."),
            w.tell('"There is something outside," whispered {h}.', '"Do you hear that?" whispered {h}.', '"I am so afraid," said {h}.'),
            w.tell('"Then we will go and see," said {f}. "Together we are strong."', '"Being afraid is not bad," said {f}. "Let us look what it is."', '"Take my hand," said {f}. "We will look at it together."'),
            w.tell("They took {athing} along, to be safe.", "{f} carried {athing}, just in case.", "{h} took {athing} along. It made {him} feel braver."),
        ],
        [
            w.tell("Step by step they went out to the {place}.", "Slowly they opened the door.", "They tiptoed towards the {place}."),
            w.tell("And what was it? It was {truth}!", "Then they saw it. It was {truth}!", "They looked closely. It was {truth}!"),
            w.tell("{h} laughed so loudly that {f} had to laugh too.", "They looked at each other and laughed.", '"Is that all?" said {h}, and both of them laughed.'),
            w.tell('"I will never be afraid of that again," said {h}.', '"Next time I will look first," said {h}.', "From then on {h} was not so afraid of {fear}."),
        ],
        ending(w),
    ]  # fmt: skip


def quarrel(w: World) -> list[list[str]]:
    w.words["time"] = w.draw.pick(TIMES)
    w.fact("What did {h} and {f} quarrel about?", "They quarrelled about {athing}.")
    w.fact("Where did they find the {noun}?", "They found it in the {other}.")
    w.fact("Who said sorry first?", "{h} said sorry first.")
    return [
        [*opening(w), knows_friend(w)],
        [
            w.tell("{time}, {h} and {f} found {athing} in the {other}.", "{time}, the two of them walked through the {other} and found {athing}."),
            w.tell('"I saw it first," said {h}.', '"It is mine," said {h}. "I saw it before you."'),
            w.tell('"But I picked it up," said {f}.', '"No, it is mine," said {f}, and would not let go.'),
            w.tell("They pulled and pulled, and neither of them would give in.", "Soon they were shouting at each other.", "They quarrelled until both of them were red in the face."),
            w.tell("In the end {f} walked away without a word.", "At last {f} went home, and {h} kept the {noun}.", "Then {f} turned around and left."),
        ],
        [
            w.tell("Now {h} had the {thing} all to {himself}."),
            w.tell("But playing alone was no fun.", "But it was very quiet without {f}.", "But somehow it did not feel good."),
            w.tell("{He} thought of {f} the whole evening.", "{He} could not sleep that night.", '"A {noun} cannot laugh," {he} thought, "and it cannot talk to me."' if w.noun[0] not in "aeiou" else "{He} missed {his} friend."),
        ],
        [
            w.tell("The next morning {h} went to {f}.", "Early the next day {h} knocked at the door of {f}."),
            w.tell('"I am sorry," said {h}. "You can have the {noun}."', '"I was wrong," said {h}. "I am sorry. Here is the {noun}."'),
            w.tell('"I am sorry too," said {f}. "Let us share it."', '"Let us take turns," said {f}. "One day you, one day I."', '"We will both have it," said {f}, and held out a hand.'),
            w.tell("And that is what they did.", "So they shared the {thing}, and there was no quarrel any more.", "They played with the {noun} until it got dark."),
        ],
        ending(w),
    ]  # fmt: skip


def rescue(w: World) -> list[list[str]]:
    w.words["trouble"], w.words["how"] = w.draw.pick(
        (
            ("had fallen into a pit", "let down one end of a branch and pulled"),
            ("was stuck in the mud", "laid down some boards and pulled with all might"),
            ("had hurt a foot", "made a bandage and found a stick to lean on"),
            ("was caught in a thorn bush", "bent the thorns aside one by one"),
            ("had lost the way", "knew every path and led the way"),
            ("sat on a roof and could not get down", "fetched a ladder and held it tight"),
        )
    )
    w.words["time"] = w.draw.pick(TIMES)
    w.fact("What had happened to {f}?", "{f} {trouble}.")
    w.fact("What did {h} get from {f}?", "{h} got {athing} from {f}.")
    w.fact("Where did {h} go?", "{h} went to the {other}.")
    return [
        opening(w),
        [
            w.tell("{time}, {h} was on the way to the {other}.", "{time}, {h} went to the {other} to look for berries.", "{time}, {h} took a walk to the {other}."),
            w.tell("Suddenly {he} heard someone call for help.", 'Then {he} heard a voice. "Help! Help!"', "All at once {he} stood still. Was somebody crying?"),
            w.tell("It was {afkind} named {f}, who {trouble}.", "{He} ran and found {afkind} named {f}, who {trouble}.") if not any("{f}" in u for u in w.used) else w.tell("It was {f}, who {trouble}.", "{He} ran and found {f}, who {trouble}."),
        ],
        [
            w.tell('"Please help me," said {f}.', '"I have been here since this morning," said {f}.', '"Nobody hears me," said {f}.'),
            w.tell('"Do not be afraid," said {h}. "I will help you."', '"Hold on," said {h}. "I am coming."', '"I will not leave you here," said {h}.'),
            w.tell("{h} {how}.", "{h} did not wait long: {he} {how}."),
            w.tell("It took a long time, but at last {f} was safe.", "And little by little it worked: {f} was safe.", "A moment later {f} was safe."),
        ],
        [
            w.tell('"You saved me," said {f}.', '"How can I ever thank you?" asked {f}.', "{f} did not know what to say for joy."),
            w.tell("The next day {f} came and brought {athing}.", "{f} gave {h} {athing} as a gift.", '"Take this," said {f}, and gave {h} {athing}.'),
            w.tell("{h} keeps the {noun} to this day.", "{h} liked the {thing} very much.", "{h} had never had such {athing} before.", '"I would have helped you without the {noun}," said {h}, "but it is lovely."'),
        ],
        ending(w),
    ]  # fmt: skip


def gift(w: World) -> list[list[str]]:
    w.words["time"] = w.draw.pick(TIMES)
    w.words["hide"] = w.draw.pick(
        ("under the bed", "behind the curtain", "in an old chest", "on top of the cupboard")
    )
    w.words["price"] = str(w.draw.integer(3, 12))
    w.fact("What did {h} buy?", "{h} bought {athing}.")
    w.fact("Where did {h} hide the {noun}?", "{h} hid the {noun} {hide}.")
    w.fact("Whose birthday was it?", "It was the birthday of {f}.")
    w.fact("How much did the {noun} cost?", "It cost {price} coins.")
    return [
        [*opening(w), knows_friend(w)],
        [
            w.tell("Soon it would be the birthday of {f}, and {h} wanted to find the best gift of all.", "The birthday of {f} was near, and {h} had no gift yet."),
            w.tell("{time}, {he} went to the {other}.", "{time}, {he} walked all the way to the {other}."),
            w.tell("There {he} saw {athing}. It cost {price} coins.", "In a small shop {he} found {athing} for {price} coins."),
            w.tell("{h} counted all {his} coins. It was just enough.", "{h} had saved for a whole year, and now {he} bought it.", "{h} paid and carried it home very carefully."),
        ],
        [
            w.tell("At home {he} hid the {noun} {hide}.", "{He} hid the {thing} {hide}, so that {f} would not see it."),
            w.tell('"What are you hiding?" asked {f}, who had come in without a sound.', "But {f} was curious and asked what {h} was doing."),
            w.tell('"Oh, nothing," said {h}, and went red.', '"You will see," said {h}, and smiled.', '"That is a secret until tomorrow," said {h}.'),
        ],
        [
            w.tell("Then the big day came.", "The next morning it was time.", "At last the birthday was there."),
            w.tell("{h} brought the {thing} and sang a song.", '"Happy birthday!" cried {h}, and held out the {thing}.'),
            w.tell("{f} could not believe it.", "{f} jumped for joy.", '"For me?" asked {f}. "It is just what I wanted!"'),
            w.tell("That was the best birthday {f} had ever had.", "{f} would not let go of the {noun} all day.", "Seeing {f} so happy was a gift for {h} too."),
        ],
        ending(w),
    ]  # fmt: skip


def contest(w: World) -> list[list[str]]:
    w.words["sport"], w.words["mishap"] = w.draw.pick(
        (
            ("race around the lake", "slipped on a wet stone and fell"),
            ("rowing race", "lost an oar"),
            ("sack race", "tumbled over a root"),
            ("climbing contest", "got a foot caught in a crack"),
            ("sledge race", "drove into a heap of snow"),
        )
    )
    w.words["time"] = w.draw.pick(TIMES)
    w.fact("What was the prize?", "The prize was {athing}.")
    w.fact("What happened to {f}?", "{f} {mishap}.")
    w.fact("What kind of contest was it?", "It was a {sport}.")
    return [
        [*opening(w), knows_friend(w)],
        [
            w.tell("{time}, there was a {sport}, and the prize was {athing}.", "{time}, all the neighbours came to the {other} for a {sport}. The prize was {athing}."),
            w.tell("{h} wanted to win, and so did {f}.", '"I will win," said {f}. "We will see," said {h}.', "Both {h} and {f} had trained for weeks."),
            w.tell("At the sound of a bell they were off.", '"Ready, steady, go!" And they were off.', "Everybody cheered, and they started."),
        ],
        [
            w.tell("At first {f} was ahead.", "{f} was faster and soon far ahead.", "For a long time nobody could say who was faster."),
            w.tell("But then {f} {mishap}.", "Shortly before the end, {f} {mishap}.", "Then it happened: {f} {mishap}."),
            w.tell("{h} could have won now.", "Now the way was free for {h}.", "{h} only had to go on."),
            w.tell("But {he} stopped and turned around.", "But {h} did not think of the prize any more. {He} ran back to help.", "But {h} stopped and held out a hand to {f}."),
        ],
        [
            w.tell('"Why do you not go on?" asked {f}.', '"You are losing because of me," said {f}.', '"Go, or you will not win," said {f}.'),
            w.tell('"A friend is worth more than a prize," said {h}.', '"I would rather lose with you than win alone," said {h}.', '"We go together," said {h}.'),
            w.tell("Side by side they came in, last of all, and everybody clapped.", "They were the last to arrive, but nobody was cheered more."),
            w.tell("And the winner came up and gave them the {thing}.", "And in the end they were given the {thing} all the same.", "The judge smiled and gave the {thing} to both of them."),
        ],
        ending(w),
    ]  # fmt: skip


def errand(w: World) -> list[list[str]]:
    w.words["who"] = w.draw.pick(("grandmother", "grandfather", "aunt", "uncle"))
    w.words["weather"], w.words["shelter"] = w.draw.pick(
        (
            ("it began to rain", "under a big tree"),
            ("it began to snow", "in an old hut"),
            ("a storm came up", "in a dry cave"),
            ("thick fog came up", "beside a stone wall"),
        )
    )
    w.words["time"] = w.draw.pick(TIMES)
    w.fact("What did {h} carry?", "{h} carried {athing}.")
    w.fact("Who was waiting for {h}?", "{h} was expected by {his} {who}.")
    w.fact("Where did {h} wait?", "{h} waited {shelter}.")
    return [
        opening(w),
        [
            w.tell("{time}, {h} had to bring {athing} to {his} {who} in the {other}.", "{time}, {his} mother said, \"Please take this {thing} to your {who} in the {other}.\""),
            w.tell('"Do not stop on the way," {his} mother said.', "It was a long way, but {h} was proud to go alone.", "{h} packed some {food} and set out."),
            w.tell("Half of the way was done when {weather}.", "{He} had not gone far when {weather}.", "All went well until {weather}."),
            w.tell("Soon {he} could not see the path any more, so {he} waited {shelter}.", "{h} looked for a dry place and waited {shelter}."),
        ],
        [
            knows_friend(w),
            w.tell("There somebody was sitting already. It was {f}.", "And who else was there? It was {f}."),
            w.tell('"Come closer, it is warmer here," said {f}.', '"What are you doing out here?" asked {f}.', '"You look cold," said {f}.'),
            w.tell('"I must bring the {noun} to my {who}," said {h}, "but I do not know the way any more."', '"I have lost my way," said {h}, "and my {who} is waiting for the {noun}."'),
            w.tell('"I know the way," said {f}. "I will go with you."', '"It is not far," said {f}. "Come, I will show you."'),
        ],
        [
            w.tell("When it was over, they went on together.", "Hand in hand they walked on."),
            w.tell("Before evening they saw the lights of the {other}.", "Soon they saw smoke above a roof: it was the right house."),
            w.tell("The {who} stood at the door and was very glad.", '"There you are!" cried the {who}. "And you have brought the {thing}!"', "The {who} put the {thing} on the table and hugged them both."),
            thanks(w),
        ],
        ending(w),
    ]  # fmt: skip


PLOTS: tuple[Plot, ...] = (lost, reach, making, fear, quarrel, rescue, gift, contest, errand)


def write_story(
    draw: Draw, *, hero: Being | None = None, thing: str = "", place: str = "", plot: Plot | None = None
) -> Story:
    """A story; what the caller does not give is drawn."""
    world = World.make(draw, hero=hero, thing=thing, place=place)
    world.words["himself"] = "himself" if world.hero.gender == "he" else "herself"
    world.words["time_low"] = "one day"
    paragraphs = (plot or draw.pick(PLOTS))(world)
    text = "\n\n".join(" ".join(s for s in sentences if s) for sentences in paragraphs)
    return Story(text, (world.hero.name, world.friend.name), world.thing, tuple(world.facts))
