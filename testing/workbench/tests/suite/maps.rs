//! `leasehold-workbench maps`: the line, the JSON object, one map again.

use super::*;

#[cfg(feature = "cuda")]
#[test]
fn random_maps_are_tried_and_told() {
    let output = call(&["maps", "--sim", "--maps", "150"]);
    let why = String::from_utf8(output.stderr).unwrap();
    if std::env::var_os("LEASEHOLD_REQUIRE_TOOLS").is_none() && why.contains("g++") {
        return; // no g++
    }
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{why}");
    assert!(text.starts_with("cuda:0: 150 maps: the driver accepts"), "{text}");
    let report = json(&["maps", "--sim", "--seed", "20", "--maps", "60", "--json"]);
    let number = |name: &str| report[name].as_u64().unwrap();
    assert!(number("maps") == 60 && number("copied") > 10 && number("interleaved") > 1, "{report}");
    assert!(number("accepted") >= number("copied"), "{report}");
}
