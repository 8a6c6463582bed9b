//! Tests of the debug aids as text.

use super::*;

#[test]
fn what_is_printed_parses() {
    assert_eq!(DebugAids::default().to_string(), "");
    for text in [
        "pass-through",
        "poison,red-zone=512,quarantine=1048576",
        "red-zone=64,guard",
        "poison,pass-through",
    ] {
        assert_eq!(text.parse::<DebugAids>().unwrap().to_string(), text);
    }
}

#[test]
fn aids_are_read_from_text() -> Result<()> {
    let all: DebugAids = "all".parse()?;
    assert_eq!(
        (all.poison, all.red_zone, all.quarantine, all.direct()),
        (true, 256, 64 << 20, false)
    );
    let some: DebugAids = "guard, red-zone=64K,quarantine=1G".parse()?;
    assert_eq!(
        (some.guard, some.red_zone, some.quarantine, some.poison),
        (true, 64 << 10, 1 << 30, false)
    );
    for (text, want) in [
        ("", "debug aid ``"),
        ("posion", "debug aid `posion`"),
        ("poison=3", "debug aid `poison=3`"),
        ("red-zone=0", "`0` is no size"),
        ("quarantine=8T", "`8T` is no size"),
        ("quarantine=99999999999G", "is no size"),
        ("guard,pass-through", "exclude each other"),
    ] {
        let err = text.parse::<DebugAids>().map_or_else(|e| e.to_string(), |_| String::new());
        assert!(err.contains(want), "{text:?}: {err}");
    }
    Ok(())
}
