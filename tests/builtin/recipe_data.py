# extra: template
"""Small data sets for the recipes, each of which can be learned in seconds."""

import csv
import io
import json
import random
import tarfile

import pytest
import torch

from images import save_images
from utils.settings.deleted_extras import read_deleted_extras

WORDS = "rank batch ring until gradients are summed on every node".split()


def image_folder(folder, size=16):
    if "images" in read_deleted_extras():
        pytest.skip("this fork has no extra images")
    for split, count in (("train", 40), ("val", 10)):
        save_images(folder / split, dict.fromkeys(("red", "green", "blue"), count), size=size, seed=len(split))


def lines_of_words(folder):
    rng = random.Random(0)
    for split, lines in (("train", 300), ("val", 40)):
        text = "\n".join(" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(lines))
        (folder / f"{split}.txt").write_text(text)


def texts_of_two_kinds(folder):
    """Words as in training, and shuffled characters, which cannot be predicted."""
    lines_of_words(folder)
    text = list((folder / "val.txt").read_text())
    random.Random(0).shuffle(text)
    (folder / "val-shuffled.txt").write_text("".join(text[:700]))


def shapes_with_masks(folder):
    """Squares of three colors on gray; the border of each is ignored."""
    from torchvision.io import write_png

    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 64), ("val", 20)):
        for kind in ("images", "masks"):
            (folder / split / kind).mkdir(parents=True)
        for number in range(count):
            image, mask = torch.full((3, 40, 40), 128.0), torch.zeros(1, 40, 40)
            for color in range(3):
                top, left = torch.randint(2, 24, (2,), generator=generator).tolist()
                mask[:, top - 1 : top + 13, left - 1 : left + 13] = 255
                mask[:, top : top + 12, left : left + 12] = color + 1
                image[:, top : top + 12, left : left + 12] = 30
                image[color, top : top + 12, left : left + 12] = 220
            image += 10 * torch.randn(image.shape, generator=generator)
            write_png(image.clamp(0, 255).byte(), str(folder / split / "images" / f"{number:03d}.png"))
            write_png(mask.byte(), str(folder / split / "masks" / f"{number:03d}.png"))


def shapes_with_boxes(folder):
    """Up to three squares on gray, whose classes are their colors; a third of the images has none."""
    from torchvision.io import write_png

    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    for split, count in (("train", 96), ("val", 24)):
        (folder / split / "images").mkdir(parents=True)
        lines = ["image,class,left,top,right,bottom"]
        for number in range(count):
            image = torch.full((3, 64, 64), 128.0)
            for quarter in rng.sample(range(4), rng.choice([0, 1, 3])):  # they do not overlap
                color, size = rng.randrange(3), rng.randrange(12, 24)
                top, left = (32 * place + rng.randrange(32 - size) for place in divmod(quarter, 2))
                image[:, top : top + size, left : left + size] = 30
                image[color, top : top + size, left : left + size] = 220
                lines.append(f"{number:03d}.png,{color + 1},{left},{top},{left + size},{top + size}")
            image += 10 * torch.randn(image.shape, generator=generator)
            write_png(image.clamp(0, 255).byte(), str(folder / split / "images" / f"{number:03d}.png"))
        (folder / split / "boxes.csv").write_text("\n".join(lines))


def token_files(folder):
    """Documents of ascending numbers from 1 to 19, and then from 1 again; 0 ends each."""
    rng = random.Random(0)
    for split, documents in (("train", 800), ("val", 80)):
        tokens = []
        for _ in range(documents):
            first = rng.randrange(19)
            tokens += [1 + (first + place) % 19 for place in range(rng.randrange(4, 24))] + [0]
        torch.tensor(tokens).to(torch.uint16).numpy().tofile(folder / f"{split}.bin")


def pairs_of_image_and_text(folder):
    """Four quarters of five colors each; a token of the text names a quarter and its color, in any order."""
    generator = torch.Generator().manual_seed(0)
    palette = torch.tensor([[220, 30, 30], [30, 220, 30], [30, 30, 220], [220, 220, 30], [128, 128, 128]])
    numbers = torch.randperm(5**4, generator=generator)
    for split, chosen in (("train", numbers[:500]), ("val", numbers[500:600])):
        colors = torch.stack([chosen // 5**place % 5 for place in range(4)], 1)
        texts = colors + 1 + 5 * torch.arange(4)
        order = torch.rand(texts.shape, generator=generator).argsort(1)
        images = palette[colors].view(-1, 2, 2, 3).permute(0, 3, 1, 2).repeat_interleave(8, 2).repeat_interleave(8, 3)
        images = (images + 20 * torch.randn(images.shape, generator=generator)).clamp(0, 255).byte()
        torch.save({"image": images, "text": texts.gather(1, order)}, folder / f"{split}.pt")


def ratings(folder):
    rng = random.Random(0)
    taste = [[rng.gauss(0, 1) for _ in range(2)] for _ in range(60)]
    for split, count in (("train", 2000), ("val", 300)):
        with (folder / f"{split}.csv").open("w") as file:
            for _ in range(count):
                user, item = rng.randrange(30), 30 + min(rng.randrange(30), rng.randrange(30))
                rating = sum(a * b for a, b in zip(taste[user], taste[item], strict=True))
                csv.writer(file).writerow([user, item, round(rating, 3), rng.choice([0.5, 1.0, 2.0])])


def table(folder):
    """One row in eight is positive; the label depends on all columns."""
    pytest.importorskip("pandas")
    rng = random.Random(0)
    with (folder / "table.csv").open("w") as file:
        print("city,product,age,income,label", file=file)
        for _ in range(1500):
            city, product, age, income = rng.randrange(6), rng.randrange(9), rng.uniform(18, 80), rng.gauss(3, 1)
            score = city - product / 2 + age / 20 + income + rng.gauss(0, 1)
            print(f"c{city},p{product},{age:.2f},{income:.4f},{int(score > 9)}", file=file)


def tar_shards(folder):
    image_folder(folder / "images")
    for split in ("train", "val"):
        (folder / split).mkdir()
        files = sorted((folder / "images" / split).glob("*/*.png"))
        random.Random(0).shuffle(files)
        for shard in range(2):
            with tarfile.open(folder / split / f"{shard}.tar", "w") as tar:
                for number, file in enumerate(files[shard::2]):
                    label = ["blue", "green", "red"].index(file.parent.name)
                    for suffix, data in (("png", file.read_bytes()), ("cls", str(label).encode())):
                        member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                        member.size = len(data)
                        tar.addfile(member, io.BytesIO(data))


def hub_images(folder):
    datasets = pytest.importorskip("datasets")
    image_folder(folder / "images")
    for split in ("train", "val"):
        loaded = datasets.load_dataset("imagefolder", data_dir=str(folder / "images" / split), split="train")
        loaded.save_to_disk(str(folder / split))


def timm_images(folder):
    pytest.importorskip("timm")
    image_folder(folder, size=32)


def graphs_of_two_classes(folder):
    """Random graphs of 4 to 12 nodes in four colors; the class is whether an edge joins two nodes of the first one."""
    pytest.importorskip("torch_geometric")
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 600), ("val", 100)):
        graphs = []
        for _ in range(count):
            nodes = int(torch.randint(4, 13, (), generator=generator))
            colors = torch.randint(4, (nodes,), generator=generator)
            edges = torch.randint(nodes, (2, nodes), generator=generator)
            is_first = colors[edges] == 0
            graphs.append(
                {
                    "x": torch.nn.functional.one_hot(colors, 4).float(),
                    "edge_index": torch.cat([edges, edges.flip(0)], dim=1),
                    "y": int(is_first.all(0).any()),
                }
            )
        torch.save(graphs, folder / f"{split}.pt")


def save_language_model(folder, kind, **options):
    """A small random model of transformers and a tokenizer that knows WORDS. kind: Bert or Llama."""
    transformers = pytest.importorskip("transformers")
    import tokenizers

    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    settings = getattr(transformers, f"{kind}Config")(vocab_size=len(vocabulary), pad_token_id=0, **sizes, **options)
    torch.manual_seed(0)
    names = {"Bert": "BertForSequenceClassification", "Llama": "LlamaForCausalLM"}
    getattr(transformers, names[kind])(settings).save_pretrained(folder)


def labelled_texts(folder):
    save_language_model(folder / "model", "Bert")
    rng = random.Random(0)
    for split, count in (("train", 300), ("val", 60)):
        with (folder / f"{split}.csv").open("w") as file:
            print("text,label", file=file)
            for _ in range(count):
                text = rng.choices(WORDS, k=rng.randint(2, 12))
                print(f"{' '.join(text)},{'yes' if 'gradients' in text else 'no'}", file=file)


def running_text_for_adapters(folder):
    pytest.importorskip("peft")
    running_text(folder, initializer_range=0.3)  # the head is frozen: with 0.02 its logits would all be near 0


def running_text(folder, **options):
    save_language_model(folder / "model", "Llama", **options)
    for split, count in (("train", 400), ("val", 40)):
        (folder / f"{split}.txt").write_text(" ".join(WORDS * count))


def preferences(folder):
    """Of two answers, the one that names the ring is chosen. The token that pads also ends each text."""
    transformers = pytest.importorskip("transformers")
    save_language_model(folder / "model", "Llama")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.eos_token = tokenizer.pad_token
    tokenizer.save_pretrained(folder / "model")
    rng = random.Random(0)
    others = [word for word in WORDS if word != "ring"]
    for split, count in (("train", 128), ("val", 40)):
        with (folder / f"{split}.jsonl").open("w") as file:
            for _ in range(count):
                prompt, chosen, rejected = (rng.choices(others, k=rng.randint(2, 8)) for _ in range(3))
                chosen[rng.randrange(len(chosen))] = "ring"
                texts = {"prompt": prompt, "chosen": ["", *chosen], "rejected": ["", *rejected]}
                print(json.dumps({name: " ".join(words) for name, words in texts.items()}), file=file)


def smooth_images(folder):
    """A bright disk of one of three colors, anywhere on a dark image."""
    from torchvision.io import write_png

    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(16.0)
    for split, count in (("train", 160), ("val", 32)):
        (folder / split).mkdir()
        for number in range(count):
            top, left = 4 + 8 * torch.rand(2, generator=generator)
            disk = torch.exp(-((rows[:, None] - top) ** 2 + (rows - left) ** 2) / 10)
            image = torch.full((3, 16, 16), 20.0)
            image[int(torch.randint(3, (), generator=generator))] += 220 * disk
            write_png(image.byte(), str(folder / split / f"{number:03d}.png"))


def spoken_words(folder):
    """A tone for each letter, of unequal length, with noise."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    for split, count in (("train", 240), ("val", 32)):
        texts, waveforms = [], []
        for _ in range(count):
            text = " ".join(rng.choices(WORDS[:6], k=rng.randint(1, 4)))
            tones = []
            for letter in text:
                time = torch.arange(rng.randrange(640, 1120)) / 16_000
                pitch = 0 if letter == " " else 300 * 1.12 ** (ord(letter) - ord("a"))
                tones.append(torch.sin(2 * torch.pi * pitch * time))
            waveform = torch.cat(tones)
            waveforms.append(waveform + 0.05 * torch.randn(len(waveform), generator=generator))
            texts.append(text)
        torch.save({"waveforms": waveforms, "texts": texts}, folder / f"{split}.pt")
