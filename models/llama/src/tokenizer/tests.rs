//! The bundled tokenizer, and streams over tokens that split characters.

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn bundled() -> Tokenizer {
    Tokenizer::from_slice(crate::demo_model::TOKENIZER, "tokenizer.json").unwrap()
}

/// One token for each byte, and no others: every character beyond ASCII is split.
fn bytes_only() -> Tokenizer {
    let text = include_bytes!("../../tests/models/untied-head/tokenizer.json");
    Tokenizer::from_slice(text, "tokenizer.json").unwrap()
}

/// A tokenizer of the SentencePiece kind: spaces are marked, and bytes without a token are spelled
/// `<0xNN>`.
fn byte_fallback() -> Tokenizer {
    let mut vocab = json!({"<unk>": 0, "▁": 257, "▁a": 258, "b": 259});
    for byte in 0..=255_u32 {
        vocab[format!("<0x{byte:02X}>")] = json!(byte + 1);
    }
    let json = json!({
        "version": "1.0", "added_tokens": [],
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>", "byte_fallback": true},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
    });
    Tokenizer::from_slice(json.to_string().as_bytes(), "tokenizer.json").unwrap()
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> (Vec<String>, String) {
    let mut stream = tokenizer.stream();
    let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    pieces.push(stream.finish().unwrap());
    let whole = pieces.concat();
    (pieces, whole)
}

#[test]
fn text_survives_a_round_trip() {
    let tokenizer = bundled();
    assert_eq!(tokenizer.vocab_size(), 4096);
    for text in
        ["", "def main():\n    return 0\n", "  spaces\t and ünïcödé — 漢字 🦀\r\n", "\u{0}\u{7f}"]
    {
        let ids = tokenizer.encode(text).unwrap();
        assert!(ids.iter().all(|&id| id < 4096));
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        assert_eq!(streamed(&tokenizer, &ids).1, text);
    }
}

#[test]
fn special_tokens_and_unknown_ids_have_no_text() {
    let tokenizer = bundled();
    let ids = tokenizer.encode("x<|endoftext|>y").unwrap();
    assert_eq!(ids.iter().filter(|&&id| id == 0).count(), 1);
    assert_eq!(tokenizer.decode(&ids).unwrap(), "xy");
    assert_eq!(tokenizer.decode(&[u32::MAX, 4096]).unwrap(), "");
    assert_eq!(streamed(&tokenizer, &[u32::MAX, 4096]).1, "");
}

#[test]
fn a_rendered_text_gets_no_second_beginning() {
    let part = |kind: &str, id: &str| json!({kind: {"id": id, "type_id": 0}});
    let json = json!({
        "version": "1.0",
        "added_tokens": [{"id": 2, "content": "<s>", "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false}],
        "post_processor": {"type": "TemplateProcessing",
            "single": [part("SpecialToken", "<s>"), part("Sequence", "A")],
            "pair": [part("Sequence", "A"), part("Sequence", "B")],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}}},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    });
    let tokenizer = Tokenizer::from_slice(json.to_string().as_bytes(), "tokenizer.json").unwrap();
    assert_eq!(tokenizer.encode("ab").unwrap(), [2, 0, 1]);
    assert_eq!(tokenizer.encode("<s>ab").unwrap(), [2, 2, 0, 1]);
    assert_eq!(tokenizer.encode_rendered("<s>ab").unwrap(), [2, 0, 1]);
    assert_eq!(tokenizer.encode_rendered("ab").unwrap(), [0, 1]);
}

#[test]
fn a_character_comes_whole_with_its_last_token() {
    let tokenizer = bytes_only();
    let ids: Vec<u32> = "é🦀!".bytes().map(u32::from).collect();
    let (pieces, _) = streamed(&tokenizer, &ids);
    assert_eq!(pieces, ["", "é", "", "", "", "🦀", "!", ""]);
    // Cut off in the middle: printed as `decode` prints it.
    let (pieces, whole) = streamed(&tokenizer, &ids[..4]);
    assert_eq!((pieces[4].as_str(), whole), ("\u{fffd}", tokenizer.decode(&ids[..4]).unwrap()));
}

#[test]
fn byte_fallback_characters_come_whole_too() {
    let tokenizer = byte_fallback();
    let ids: Vec<u32> = [258, 259]
        .into_iter()
        .chain("é🦀".bytes().map(|b| u32::from(b) + 1))
        .chain([258])
        .collect();
    assert_eq!(tokenizer.decode(&ids).unwrap(), "abé🦀 a");
    let (pieces, whole) = streamed(&tokenizer, &ids);
    assert_eq!(whole, "abé🦀 a");
    assert_eq!(pieces, ["a", "b", "", "é", "", "", "", "🦀", " a", ""]);
}

/// Decoders of both SentencePiece kinds: one strips the first space, one writes none.
fn metaspace() -> Tokenizer {
    let json = json!({
        "version": "1.0", "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"▁a": 0, "▁b": 1, "b": 2, "▁": 3}, "merges": []},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
    });
    Tokenizer::from_slice(json.to_string().as_bytes(), "tokenizer.json").unwrap()
}

/// The prompt's text, the pieces, and both together.
fn continued(tokenizer: &Tokenizer, prompt: &[u32], ids: &[u32]) -> (String, Vec<String>, String) {
    let (text, mut stream) = tokenizer.stream_after(prompt).unwrap();
    let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    pieces.push(stream.finish().unwrap());
    let whole = text.clone() + &pieces.concat();
    (text, pieces, whole)
}

#[test]
fn a_text_continues_its_prompt_with_the_space_between_them() {
    let tokenizer = metaspace();
    let (prompt, pieces, whole) = continued(&tokenizer, &[0, 2], &[1, 1, 3]);
    assert_eq!((prompt.as_str(), whole.as_str()), ("ab", "ab b b "));
    assert_eq!(pieces, [" b", " b", " ", ""]);
    let tokenizer = byte_fallback();
    let (prompt, pieces, whole) = continued(&tokenizer, &[258], &[258, 259]);
    assert_eq!((prompt.as_str(), whole.as_str()), ("a", "a ab"));
    assert_eq!(pieces, [" a", "b", ""]);
    // A prompt without text, and none: the text begins.
    assert_eq!(continued(&tokenizer, &[9999], &[258]).2, "a");
    assert_eq!(continued(&tokenizer, &[], &[258]).2, "a");
}

#[test]
fn a_character_across_the_seam_comes_with_its_last_token() {
    for (tokenizer, shift) in [(bytes_only(), 0), (byte_fallback(), 1)] {
        let bytes = |text: &str| text.bytes().map(|b| u32::from(b) + shift).collect::<Vec<_>>();
        // A prompt longer than a window, whose characters no cut may halve.
        for text in ["é漢", "漢字🦀", &"漢".repeat(100), &("x".to_owned() + &"é🦀".repeat(60))]
        {
            let ids = bytes(text);
            for seam in ids.len() - 4..=ids.len() {
                let (prompt, pieces, whole) = continued(&tokenizer, &ids[..seam], &ids[seam..]);
                assert_eq!(whole, text, "{seam} of {}", ids.len());
                assert!(!prompt.contains(REPLACEMENT), "{prompt}");
                assert!(!pieces.concat().contains(REPLACEMENT), "{pieces:?}");
            }
        }
        // The replacement as a character of the prompt, and one that stays incomplete.
        assert_eq!(continued(&tokenizer, &bytes("a\u{fffd}"), &bytes("b")).2, "a\u{fffd}b");
        assert_eq!(continued(&tokenizer, &bytes("é🦀")[..5], &[]).2.chars().next(), Some('é'));
    }
}

#[test]
fn long_runs_of_bytes_keep_their_characters() {
    let tokenizer = byte_fallback();
    for text in ["漢".repeat(500), "a".to_owned() + &"漢é🦀".repeat(200)] {
        let ids: Vec<u32> = text.bytes().map(|b| u32::from(b) + 1).collect();
        assert_eq!(streamed(&tokenizer, &ids).1, text);
    }
}

#[test]
fn the_window_stays_small() {
    let tokenizer = bytes_only();
    let mut stream = tokenizer.stream();
    let mut whole = String::new();
    for i in 0..10_000 {
        whole += &stream.push([0xf0, 0x9f, 0xa6, 0x80][i % 4]).unwrap();
        assert!(stream.window.len() <= WINDOW + MAX_PENDING);
    }
    assert_eq!(whole + &stream.finish().unwrap(), "🦀".repeat(2500));
    let (_, garbage) = streamed(&tokenizer, &[0xff; 1000]);
    assert_eq!(garbage.chars().count(), 1000);
}

#[test]
fn truncation_and_padding_of_the_file_are_left_out() {
    let text = include_str!("../../tests/models/untied-head/tokenizer.json");
    let mut json: serde_json::Value = serde_json::from_str(text).unwrap();
    json["truncation"] =
        json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
    json["padding"] = json!({"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 258,
        "pad_type_id": 0, "pad_token": "<pad>"});
    let tokenizer = Tokenizer::from_slice(json.to_string().as_bytes(), "tokenizer.json").unwrap();
    assert_eq!(tokenizer.encode("abcdef").unwrap(), b"abcdef".map(u32::from));
    assert_eq!(tokenizer.encode("ab").unwrap(), [97, 98]);
}

#[test]
fn wrong_files_are_errors_that_name_them() {
    for text in ["", "{}", "[]", "{\"version\": \"1.0\"}", "{\"model\": {\"type\": \"Nothing\"}}"] {
        let error = Tokenizer::from_slice(text.as_bytes(), "some/tokenizer.json").expect_err(text);
        assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
        assert!(error.to_string().contains("some/tokenizer.json"), "{error}");
    }
    assert!(Tokenizer::from_slice(b"\xff\xfe", "x").is_err());
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(Tokenizer::from_dir(dir.path()), Err(Error::NotFound(_))));
    std::fs::write(
        dir.path().join("tokenizer.json"),
        include_bytes!("../../tests/models/untied-head/tokenizer.json"),
    )
    .unwrap();
    assert_eq!(Tokenizer::from_dir(dir.path()).unwrap().vocab_size(), 259);
}

/// `tokenizers` 0.23.2 panics on each of these.
#[test]
fn a_decoder_that_is_no_json_is_an_error() {
    let text = include_str!("../../tests/models/untied-head/tokenizer.json");
    for wrong in ["\"decoder\": tru", "\"decoder\": \u{1}", "\"decoder\": \"\\ud800\", \"x\":"] {
        let json = text.replace("\"decoder\":", wrong);
        assert_ne!(json, text);
        assert!(
            matches!(Tokenizer::from_slice(json.as_bytes(), "x"), Err(Error::InvalidArgument(_))),
            "{wrong}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// The pieces form the decoded text, for any bytes, over several windows.
    #[test]
    fn pieces_join_to_the_whole(ids in prop::collection::vec(0_u32..259, 0..200)) {
        let tokenizer = bytes_only();
        prop_assert_eq!(streamed(&tokenizer, &ids).1, tokenizer.decode(&ids).unwrap());
    }

    /// The prompt's text and the pieces form the decoded text, wherever the seam is.
    #[test]
    fn a_prompt_and_its_continuation_join_to_the_whole(
        ids in prop::collection::vec(0_u32..259, 0..200), seam in any::<prop::sample::Index>()
    ) {
        let tokenizer = bytes_only();
        let seam = seam.index(ids.len() + 1);
        let whole = continued(&tokenizer, &ids[..seam], &ids[seam..]).2;
        prop_assert_eq!(whole, tokenizer.decode(&ids).unwrap());
    }

    /// Text in scripts of all lengths arrives in whole characters.
    #[test]
    fn text_never_shows_a_replacement(text in "[aé漢🦀 ]{0,60}") {
        let tokenizer = bytes_only();
        let ids: Vec<u32> = text.bytes().map(u32::from).collect();
        let (pieces, whole) = streamed(&tokenizer, &ids);
        prop_assert_eq!(&whole, &text);
        prop_assert!(pieces.iter().all(|piece| !piece.contains(REPLACEMENT)));
    }

    /// A changed byte of the file gives a tokenizer or an error.
    #[test]
    fn a_changed_file_is_taken_or_refused(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut json = include_bytes!("../../tests/models/untied-head/tokenizer.json").to_vec();
        let at = at.index(json.len());
        json[at] = byte;
        if let Ok(tokenizer) = Tokenizer::from_slice(&json, "tokenizer.json") {
            let _ = tokenizer.encode("aé🦀<s>").map(|ids| streamed(&tokenizer, &ids));
        }
    }
}

/// Files that make the library panic: while it reads, encodes or decodes.
#[test]
fn what_makes_the_library_panic_is_an_error() {
    let with = |key: &str, value: serde_json::Value| {
        let mut json = json!({"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}});
        json[key] = value;
        json["pre_tokenizer"] = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        Tokenizer::from_slice(json.to_string().as_bytes(), "tokenizer.json")
    };
    let said = |e: Error, what: &str| {
        let text = e.to_string();
        assert!(
            text.starts_with(&format!(
                "invalid argument: tokenizer.json: {what}: its library failed: "
            )),
            "{text}"
        );
    };
    let charsmap = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"});
    said(with("normalizer", charsmap).unwrap_err(), "no valid tokenizer");
    let strip =
        with("decoder", json!({"type": "Strip", "content": "a", "start": 0, "stop": 9})).unwrap();
    said(strip.decode(&[0]).unwrap_err(), "the ids cannot be decoded");
    said(strip.stream().push(0).unwrap_err(), "the ids cannot be decoded");
    let empty = json!({"type": "Replace", "pattern": {"String": ""}, "content": "x"});
    said(with("normalizer", empty).unwrap().encode("a").unwrap_err(), "the text cannot be encoded");
    // Other panics on this thread are reported again.
    assert!(!INSIDE.get());
}
