//! Each operation, refusals, bounds, and damaged files. The pickles are what CPython's `pickle`
//! writes.

use super::*;

const WORDS: &[&str] = &["a", "b", "key", "self"];

fn read(file: &[u8]) -> Result<Pickle, PickleError> {
    Pickle::read(file, WORDS)
}

fn error(file: &[u8]) -> String {
    read(file).map_or_else(|e| e.to_string(), |p| format!("{p:?}"))
}

/// `{"key": [0, 255, 65535, 2**31 - 1, 2**40, 2**63, -1, 2**70], "a": ("b", "key", "c", 1.5, True,
/// None), "c": b"xyz"}`, without the bytes for protocols below 3.
#[rustfmt::skip]
const FILES: [&[u8]; 6] = [
    b"(dp0\nVkey\np1\n(lp2\nI0\naI255\naI65535\naI2147483647\naL1099511627776L\naL9223372036854775808L\naI-1\naL1180591620717411303424L\nasVa\np3\n(Vb\np4\ng1\nVc\np5\nF1.5\nI01\nNtp6\nsg5\nNs.",
    b"}q\x00(X\x03\x00\x00\x00keyq\x01]q\x02(K\x00K\xffM\xff\xffJ\xff\xff\xff\x7fL1099511627776L\nL9223372036854775808L\nJ\xff\xff\xff\xffL1180591620717411303424L\neX\x01\x00\x00\x00aq\x03(X\x01\x00\x00\x00bq\x04h\x01X\x01\x00\x00\x00cq\x05G?\xf8\x00\x00\x00\x00\x00\x00I01\nNtq\x06h\x05Nu.",
    b"\x80\x02}q\x00(X\x03\x00\x00\x00keyq\x01]q\x02(K\x00K\xffM\xff\xffJ\xff\xff\xff\x7f\x8a\x06\x00\x00\x00\x00\x00\x01\x8a\t\x00\x00\x00\x00\x00\x00\x00\x80\x00J\xff\xff\xff\xff\x8a\t\x00\x00\x00\x00\x00\x00\x00\x00@eX\x01\x00\x00\x00aq\x03(X\x01\x00\x00\x00bq\x04h\x01X\x01\x00\x00\x00cq\x05G?\xf8\x00\x00\x00\x00\x00\x00\x88Ntq\x06h\x05Nu.",
    b"\x80\x03}q\x00(X\x03\x00\x00\x00keyq\x01]q\x02(K\x00K\xffM\xff\xffJ\xff\xff\xff\x7f\x8a\x06\x00\x00\x00\x00\x00\x01\x8a\t\x00\x00\x00\x00\x00\x00\x00\x80\x00J\xff\xff\xff\xff\x8a\t\x00\x00\x00\x00\x00\x00\x00\x00@eX\x01\x00\x00\x00aq\x03(X\x01\x00\x00\x00bq\x04h\x01X\x01\x00\x00\x00cq\x05G?\xf8\x00\x00\x00\x00\x00\x00\x88Ntq\x06h\x05C\x03xyzq\x07u.",
    b"\x80\x04\x95b\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x03key\x94]\x94(K\x00K\xffM\xff\xffJ\xff\xff\xff\x7f\x8a\x06\x00\x00\x00\x00\x00\x01\x8a\t\x00\x00\x00\x00\x00\x00\x00\x80\x00J\xff\xff\xff\xff\x8a\t\x00\x00\x00\x00\x00\x00\x00\x00@e\x8c\x01a\x94(\x8c\x01b\x94h\x01\x8c\x01c\x94G?\xf8\x00\x00\x00\x00\x00\x00\x88Nt\x94h\x05C\x03xyz\x94u.",
    b"\x80\x05\x95b\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x03key\x94]\x94(K\x00K\xffM\xff\xffJ\xff\xff\xff\x7f\x8a\x06\x00\x00\x00\x00\x00\x01\x8a\t\x00\x00\x00\x00\x00\x00\x00\x80\x00J\xff\xff\xff\xff\x8a\t\x00\x00\x00\x00\x00\x00\x00\x00@e\x8c\x01a\x94(\x8c\x01b\x94h\x01\x8c\x01c\x94G?\xf8\x00\x00\x00\x00\x00\x00\x88Nt\x94h\x05C\x03xyz\x94u.",
];

#[test]
fn every_protocol_gives_the_same_data() {
    for (protocol, file) in FILES.iter().enumerate() {
        let pickle = read(file).unwrap_or_else(|e| panic!("protocol {protocol}: {e}"));
        let root = pickle.root();
        let numbers: Vec<_> = root.get("key").unwrap().items().map(Node::number).collect();
        let expect = [0, 255, 65535, (1 << 31) - 1, 1 << 40, 1 << 63].map(Some);
        assert_eq!(numbers[..6], expect, "protocol {protocol}");
        assert_eq!(numbers[6..], [None, None], "protocol {protocol}: out of range");
        let tuple = root.get("a").unwrap();
        let words: Vec<_> = tuple.items().map(Node::word).collect();
        assert_eq!(words, [Some("b"), Some("key"), None, None, None, None], "{protocol}");
        assert!(tuple.is_list() && root.get("c").is_none() && root.get("b").is_none());
        assert!(!root.is_list() && root.items().len() == 0 && root.number().is_none());
    }
}

#[test]
fn rarer_operations_are_read_too() {
    // Long texts and bytes of every form of length, sets, marks that are taken back.
    for file in [
        &b"(lU\x01aaT\x01\x00\x00\x00baS'key'\naX\x01\x00\x00\x00aa."[..],
        b"]\x8d\x01\x00\x00\x00\x00\x00\x00\x00aa\x8c\x01ba\x8c\x03keya\x8c\x01aa.",
        b"\x80\x04\x8f(\x8c\x01a\x8c\x01b\x8c\x03key\x8c\x01a\x90.",
        b"\x80\x04(\x8c\x01a\x8c\x01b\x8c\x03key\x8c\x01a\x91.",
        b"(NN1(0](Va\nVb\nVkey\nVa\ne.",
        b"(S\"a\"\nVb\nVkey\r\nVa\nt.",
        b"]p70\n0Va\np1\n0g70\ng1\na(Vb\nVkey\ng1\ne.",
    ] {
        let pickle = read(file).unwrap_or_else(|e| panic!("{file:?}: {e}"));
        let words: Vec<_> = pickle.root().items().map(Node::word).collect();
        assert_eq!(words, [Some("a"), Some("b"), Some("key"), Some("a")], "{file:?}");
    }
    for file in [
        &b"\x80\x03B\x03\x00\x00\x00xyz0K\x07."[..],
        b"\x80\x04\x8e\x03\x00\x00\x00\x00\x00\x00\x00xyz0K\x07.",
        b"\x80\x05\x96\x03\x00\x00\x00\x00\x00\x00\x00xyz0K\x07.",
        b"\x80\x02\x8b\x01\x00\x00\x00\x07.",
        b"K\x07.trailing bytes",
        b"(K\x01K\x021K\x07.",
        b"K\x072(000K\x07.",
        b"I7\n.",
        b"L7\n.",
        b"L 7L\n.",
        b"\x89\x88\x860K\x07.",
    ] {
        assert_eq!(read(file).map(|p| p.root().number()), Ok(Some(7)), "{file:?}");
    }
    let long = [&b"X\x00\x10\x00\x00"[..], &[b'x'; 4096], b"V", &[b'x'; 5000], b"\n\x86."].concat();
    let pickle = read(&long).unwrap();
    assert_eq!(pickle.root().items().len(), 2);
    let digits = [&b"L"[..], &[b'9'; 5000], b"L\n."].concat();
    assert_eq!(read(&digits).map(|p| p.root().number()), Ok(None));
}

#[test]
fn a_list_that_contains_itself_is_no_loop() {
    // l = []; l.append(l); {"self": l}
    let pickle = read(b"\x80\x04}\x94\x8c\x04self\x94]\x94h\x02as.").unwrap();
    let mut list = pickle.root().get("self").unwrap();
    for _ in 0..1000 {
        list = list.items().next().unwrap();
    }
    assert_eq!(list.items().len(), 1);
    // The last entry of a key counts.
    let pickle = read(b"}(Va\nK\x01Va\nK\x02u.").unwrap();
    assert_eq!(pickle.root().get("a").and_then(Node::number), Some(2));
}

#[test]
fn what_is_no_plain_data_is_refused_by_name_and_place() {
    for (file, at, name) in [
        (&b"cos\nsystem\n(S'true'\ntR."[..], 0, "GLOBAL"),
        (
            b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.",
            16,
            "STACK_GLOBAL",
        ),
        (b"N)R.", 2, "REDUCE"),
        (b"N}b.", 2, "BUILD"),
        (b"(S'true'\nios\nsystem\n.", 9, "INST"),
        (b"(No.", 2, "OBJ"),
        (b"N)\x81.", 2, "NEWOBJ"),
        (b"N)}\x92.", 3, "NEWOBJ_EX"),
        (b"Pid\n.", 0, "PERSID"),
        (b"NQ.", 1, "BINPERSID"),
        (b"\x82\x01.", 0, "EXT"),
        (b"\x97.", 0, "an out-of-band buffer"),
    ] {
        let expect = format!(
            "byte {at}: {name}: a class, a function or another object; only plain data is read, nothing is run"
        );
        assert_eq!(error(file), expect);
    }
    for (file, expect) in [
        (&b""[..], "byte 0: the file ends here, in the middle of its data"),
        (b"\x80\x06N.", "byte 0: protocol 6; 0 to 5 are known"),
        (b"\xff", "byte 0: 0xff is no operation of a pickle"),
        (b".", "byte 0: a value is missing"),
        (b"a.", "byte 0: a value is missing"),
        (b"Na.", "byte 1: a value is missing"),
        (b"NNa.", "byte 2: no list to append to"),
        (b"NNNs.", "byte 3: no dictionary to put an entry into"),
        (b"}(Nu.", "byte 3: a key without a value"),
        (b"]\x94(a.", "byte 3: a value is missing"),
        (b"](\x85.", "byte 2: a value is missing"),
        (b"](2.", "byte 2: a value is missing"),
        (b"](.", "byte 2: a value is missing"),
        (b"t.", "byte 0: a mark is missing"),
        (b"h\x05.", "byte 0: the memo has no value 5"),
        (b"gx\n.", "byte 0: no place of the memo"),
        (b"Ix\n.", "byte 0: no number"),
        (b"Sa\n.", "byte 0: a text without its quotes"),
        (b"\x8b\xff\xff\xff\xff.", "byte 0: a negative length"),
        (
            b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffx",
            "byte 0: the file ends here, in the middle of its data",
        ),
        (b"p1\n.", "byte 0: a value is missing"),
    ] {
        assert_eq!(error(file), expect, "{file:?}");
    }
}

#[test]
fn memory_and_length_are_bounded() {
    let within = |file: &[u8], bytes, memory| {
        Pickle::read_within(file, WORDS, bytes, memory)
            .map_or_else(|e| e.to_string(), |_| "read".into())
    };
    let memory = "more values than memory is given to";
    for (part, held) in [
        (&b"N"[..], 8),
        (b"(", 8),
        (b"]", 32),
        (b"}", 32),
        (b")", 32),
        (b"2", 8),
        (b"\x8a\x06\x00\x00\x00\x00\x00\x01", 16),
    ] {
        let file = [b"N", &part.repeat(1000)[..], b"."].concat();
        assert!(within(&file, 1 << 20, 900 * held).ends_with(memory), "{part:?}");
        let told = within(&file, 1 << 20, 1010 * held);
        assert!(!told.ends_with(memory), "{part:?}: {told}");
    }
    // Nothing that is taken back is counted.
    let file = [&b"N0(1"[..]].concat().repeat(10_000);
    let file = [&file[..], b"N."].concat();
    assert_eq!(within(&file, 1 << 20, 64), "read");
    // Shared a thousand times a thousand times, which a copy would not survive.
    let mut file = b"]".to_vec();
    for _ in 0..9 {
        file.extend_from_slice(b"q\x000](");
        file.extend_from_slice(&b"h\x00".repeat(1000));
        file.extend_from_slice(b"e");
    }
    file.push(b'.');
    assert_eq!(within(&file, 1 << 20, 200_000), "read");
    // Deep.
    let deep = 200_000;
    let file = [&b"]".repeat(deep)[..], &b"a".repeat(deep - 1), b"."].concat();
    let pickle = read(&file).unwrap();
    assert_eq!(pickle.root().items().len(), 1);
    drop(pickle);
    assert!(within(b"NNNNNNNNNN.", 5, 1 << 20).ends_with("byte 5: longer than 5 bytes"));
    let endless = Pickle::read_within(io::repeat(b'('), WORDS, 1 << 30, 1 << 16);
    assert!(endless.unwrap_err().to_string().ends_with(memory));
    let endless = Pickle::read_within(io::repeat(b'V'), WORDS, 1 << 24, 1 << 16);
    assert!(endless.unwrap_err().to_string().ends_with("longer than 16777216 bytes"));
}

#[test]
fn damaged_files_are_errors_or_data() {
    let mut seed = 7_u64;
    let mut dice = move |n: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed >> 11) as usize % n
    };
    let (mut good, mut bad) = (0, 0);
    for round in 0..60_000 {
        let mut file = FILES[round % FILES.len()].to_vec();
        for _ in 0..1 + dice(4) {
            let at = dice(file.len());
            match dice(5) {
                0 => file.truncate(at.max(1)),
                1 => file[at] = dice(256) as u8,
                2 => file[at] ^= 1 << dice(8),
                3 => drop(file.remove(at)),
                _ => {
                    file.insert(at, b"(.012NJKM]})aestudlpqrghj\x80\x85\x86\x87\x94\x95"[dice(29)])
                }
            }
            if file.is_empty() {
                break;
            }
        }
        match Pickle::read_within(&file[..], WORDS, 1 << 20, 1 << 20) {
            Ok(pickle) => {
                good += 1;
                let root = pickle.root();
                for node in root.get("key").into_iter().flat_map(Node::items).chain(root.items()) {
                    let _ = (node.number(), node.word(), node.items().len(), node.get("a"));
                }
            }
            Err(_) => bad += 1,
        }
    }
    assert!(good > 1000 && bad > 1000, "{good} {bad}");
}
