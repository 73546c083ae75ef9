"""Tokenizer and chat templates, on small tokenizers made here; the tokenizers library itself is the reference."""

import hashlib
import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Rules

from keptset.rollout.tokenizer import Tokenizer
from keptset.schemas.errors import CheckpointError, InvalidInput, MissingDependency

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]


def byte_level_rules():
    """Byte-level BPE with three merges and a begin token that the tokenizer puts before every text."""
    tokens = ["<|begin|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [("h", "e"), ("he", "l"), ("Ġ", "t")]
    tokens += [left + right for left, right in merges]
    rules = Rules(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = decoders.ByteLevel()
    rules.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    rules.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", 0)]
    )
    return rules


def word_rules():
    """Words with a visible space and spelled-out bytes, as sentencepiece checkpoints have them."""
    tokens = ["<unk>", "\u2581the", "\u2581cat", "s", "<0xC3>", "<0xA9>", "<0x0A>"]
    rules = Rules(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    rules.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return rules


def write(folder, rules=None, *, tokenizer_config=None, generation_config=None, config=None):
    folder.mkdir(exist_ok=True)
    (rules or byte_level_rules()).save(str(folder / "tokenizer.json"))
    named = {"tokenizer_config": tokenizer_config, "generation_config": generation_config, "config": config}
    for name, content in named.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def load(folder, rules=None, **files):
    return Tokenizer.from_folder(write(folder, rules, **files))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return load(folder, tokenizer_config={"chat_template": CHATML, "eos_token": "<|im_end|>"})


def test_encode_gives_the_librarys_ids_as_int32(tokenizer):
    ids = tokenizer.encode("hello the<|im_end|>")
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, byte_level_rules().encode("hello the<|im_end|>").ids)


def test_a_text_gets_the_tokenizers_begin_token_unless_asked_otherwise(tokenizer):
    with_begin, without = tokenizer.encode("hel"), tokenizer.encode("hel", add_special_tokens=False)
    assert tokenizer.decode_tokens(with_begin) == ["<|begin|>", "hel"]
    np.testing.assert_array_equal(with_begin[1:], without)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_encoding_and_decoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@given(st.text(st.characters(max_codepoint=127), max_size=40))
def test_texts_of_single_tokens_joined_are_the_text_where_no_character_is_split(tokenizer, text):
    assert "".join(tokenizer.decode_tokens(tokenizer.encode(text, add_special_tokens=False))) == text


def test_parts_of_a_character_show_their_bytes(tokenizer):
    ids = tokenizer.encode("\u00e9 \U0001f98a", add_special_tokens=False)
    assert tokenizer.decode_tokens(ids) == [r"\xc3", r"\xa9", " ", r"\xf0", r"\x9f", r"\xa6", r"\x8a"]
    assert tokenizer.decode(ids[:1]) == "\ufffd"


def test_every_byte_has_its_own_token_text(tokenizer):
    ids = [tokenizer.backend.token_to_id(letter) for letter in pre_tokenizers.ByteLevel.alphabet()]
    shown = {text.encode().decode("unicode_escape") for text in tokenizer.decode_tokens(ids) if text != "\\"}
    assert shown == {chr(byte) for byte in range(256)} - {"\\"}


def test_spaces_of_word_tokens_are_shown_and_spelled_bytes_joined_only_in_decode(tmp_path):
    tokenizer = load(tmp_path, word_rules())
    assert tokenizer.decode_tokens([1, 2, 3, 4, 5, 6]) == [" the", " cat", "s", r"\xc3", r"\xa9", "\n"]
    assert tokenizer.decode([2, 3, 4, 5]) == " cats\u00e9"


def test_ids_beyond_the_tokenizer_show_as_ids_because_logits_may_be_wider(tokenizer):
    assert tokenizer.decode_tokens([tokenizer.vocab_size, 2]) == [f"<id {tokenizer.vocab_size}>", "<|im_end|>"]
    assert tokenizer.decode([tokenizer.vocab_size]) == ""


def test_special_tokens_are_left_out_of_decoded_text_on_request(tokenizer):
    ids = tokenizer.encode("<|im_start|>hel<|im_end|>")
    assert tokenizer.decode(ids) == "<|begin|><|im_start|>hel<|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hel"


@pytest.mark.parametrize("ids", [[-1], [2**32], [0.5], [[1]], ["1"], 3])
def test_ids_that_are_none_are_refused(tokenizer, ids):
    for method in (tokenizer.decode, tokenizer.decode_tokens):
        with pytest.raises(InvalidInput, match="token ids must"):
            method(ids)


def test_no_ids_are_no_text(tokenizer):
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode_tokens([]) == []


@pytest.mark.parametrize(("text", "reason"), [(b"bytes", "must be str, not bytes"), ("a\ud800", "at character 1")])
def test_a_prompt_that_is_no_text_is_refused(tokenizer, text, reason):
    with pytest.raises(InvalidInput, match=reason):
        tokenizer.encode(text)


def test_the_digest_is_that_of_the_file(tmp_path):
    tokenizer = load(tmp_path)
    assert tokenizer.digest == hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()


def test_truncation_and_padding_left_in_the_file_are_not_applied(tmp_path):
    rules = byte_level_rules()
    rules.enable_truncation(3)
    rules.enable_padding(length=8)
    for text in ("01", "0123456789"):
        assert len(load(tmp_path, rules).encode(text, add_special_tokens=False)) == len(text)


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        ({}, ()),
        ({"config": {"eos_token_id": 7}}, (7,)),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [9, 8]}}, (8, 9)),
        ({"config": {"eos_token_id": 7}, "generation_config": {"top_p": 0.9}}, (7,)),
        ({"config": {"eos_token_id": 7}, "tokenizer_config": {"eos_token": "<|im_end|>"}}, (2, 7)),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>", "lstrip": False}}}, (2,)),
        ({"tokenizer_config": {"eos_token": None}, "config": {"eos_token_id": None}}, ()),
    ],
)
def test_a_response_stops_at_the_generation_settings_tokens_and_at_the_tokenizers_own(tmp_path, files, stops):
    assert load(tmp_path, **files).stop_token_ids == stops


def test_a_stop_token_that_is_no_id_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id must be a token id"):
        load(tmp_path, config={"eos_token_id": "<|im_end|>"})


def test_a_conversation_is_rendered_and_ends_where_the_answer_begins(tokenizer):
    asked = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello there<|im_end|>\n"
    assert tokenizer.render_chat(TALK, add_generation_prompt=False) == asked
    assert tokenizer.render_chat(TALK) == asked + "<|im_start|>assistant\n"
    ids = tokenizer.encode_chat(TALK)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == asked + "<|im_start|>assistant\n"
    assert ids[0] == 1, "the template's text already holds every special token: nothing is put before it"


def test_of_several_templates_the_default_one_is_taken(tmp_path):
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    assert load(tmp_path, tokenizer_config={"chat_template": templates}).render_chat(TALK) == "yes"


def test_a_template_file_comes_before_the_tokenizer_settings(tmp_path):
    write(tmp_path, tokenizer_config={"chat_template": "settings"})
    (tmp_path / "chat_template.jinja").write_text("file: {{ messages[1].content }}\n", encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).render_chat(TALK) == "file: Hello there"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ messages[1]['content'] }}{{ pad_token is defined }}", "<|begin|>Hello thereFalse"),
        ("{{ tools is none }} {{ thinking }}", "True off"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ {'a': [1]} | tojson(indent=1) }}", '{\n "a": [\n  1\n ]\n}'),
        ("  {% for m in messages %}\n{{ m.role }};{% if true %}{% break %}{% endif %}\n  {% endfor %}", "system;"),
        ("a {% generation %}b {{ messages[0].role }}{% endgeneration %} c", "a b system c"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_templates_find_the_names_and_layout_rules_that_published_ones_use(tmp_path, template, text):
    settings = {"chat_template": template, "bos_token": "<|begin|>"}
    assert load(tmp_path, tokenizer_config=settings).render_chat(TALK, thinking="off") == text


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "does not take these messages: roles must alternate"),
        ("{{ messages[0]['content'] + messages[0]['absent'] }}", "has no attribute 'absent'"),
        ("{{ messages[0]['content'] + 1 }}", "does not take these messages"),
        ("{{ messages.append(1) }}", "does not take these messages: .*unsafe"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "does not take these messages: .*unsafe"),
    ],
)
def test_a_template_that_refuses_or_reaches_outside_its_sandbox_is_an_error(tmp_path, template, reason):
    tokenizer = load(tmp_path, tokenizer_config={"chat_template": template})
    with pytest.raises(InvalidInput, match=reason):
        tokenizer.render_chat(TALK)


def test_a_template_that_is_no_jinja_is_refused(tmp_path):
    tokenizer = load(tmp_path, tokenizer_config={"chat_template": "\n{% for x %}"})
    with pytest.raises(CheckpointError, match="not valid Jinja: line 2"):
        tokenizer.encode_chat(TALK)


@pytest.mark.parametrize("messages", ["Hello", {"role": "user", "content": "Hello"}, [], ["Hello"], [{"content": "x"}]])
def test_messages_of_the_wrong_shape_are_refused(tokenizer, messages):
    with pytest.raises(InvalidInput, match=r"must be a (list of|mapping)"):
        tokenizer.encode_chat(messages)


def test_a_model_without_a_template_says_what_to_give_instead(tmp_path):
    with pytest.raises(CheckpointError, match=r"no chat template.*text or token ids"):
        load(tmp_path).encode_chat(TALK)


@pytest.mark.parametrize(
    ("template", "reason"),
    [([{"name": "tools", "template": "x"}], r"named \['tools'\], but none named 'default'"), (3, "neither text nor")],
)
def test_a_template_entry_that_cannot_be_used_is_refused(tmp_path, template, reason):
    with pytest.raises(CheckpointError, match=reason):
        load(tmp_path, tokenizer_config={"chat_template": template})


def test_a_folder_without_a_tokenizer_says_how_to_get_one(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"[]", "must hold a JSON object, not list"),
        (b'{"model": {"type": "Nothing"}}', "does not describe a tokenizer"),
    ],
)
def test_a_damaged_tokenizer_file_is_named(tmp_path, content, reason):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json {reason}"):
        Tokenizer.from_folder(tmp_path)


def test_a_damaged_settings_file_is_named(tmp_path):
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_missing_packages_name_the_extra(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingDependency, match=r"'jinja2'.*keptset\[demo\]"):
        tokenizer.encode_chat(TALK)
    write(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingDependency, match=r"'tokenizers'.*keptset\[rollout\]"):
        Tokenizer.from_folder(tmp_path)
