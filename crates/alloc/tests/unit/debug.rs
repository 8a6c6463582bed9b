//! Tests of the debug checks as text.

use super::*;

#[test]
fn what_is_printed_parses() {
    assert_eq!(DebugOptions::default().to_string(), "");
    for text in [
        "pass-through",
        "poison,red-zone=512,quarantine=1048576",
        "red-zone=64,guard",
        "poison,pass-through",
    ] {
        assert_eq!(text.parse::<DebugOptions>().unwrap().to_string(), text);
    }
}

#[test]
fn aids_are_read_from_text() -> Result<()> {
    let all: DebugOptions = "all".parse()?;
    assert_eq!(
        (all.poison, all.red_zone, all.quarantine, all.direct()),
        (true, 256, 64 << 20, false)
    );
    let some: DebugOptions = "guard, red-zone=64K,quarantine=1G".parse()?;
    assert_eq!(
        (some.guard, some.red_zone, some.quarantine, some.poison),
        (true, 64 << 10, 1 << 30, false)
    );
    for (text, want) in [
        ("", "debug check ``"),
        ("posion", "debug check `posion`"),
        ("poison=3", "debug check `poison=3`"),
        ("red-zone=0", "`0` is no size"),
        ("quarantine=8T", "`8T` is no size"),
        ("quarantine=99999999999G", "is no size"),
        ("guard,pass-through", "exclude each other"),
    ] {
        let err = text.parse::<DebugOptions>().map_or_else(|e| e.to_string(), |_| String::new());
        assert!(err.contains(want), "{text:?}: {err}");
    }
    Ok(())
}
