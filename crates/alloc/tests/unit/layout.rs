//! Tests of the size classes.

use super::*;

#[test]
fn classes_are_tight_and_ordered() {
    for c in 1..CLASSES {
        assert!(class_size(c) > class_size(c - 1));
    }
    assert_eq!(class_size(CLASSES - 1), SLAB_MAX);
    for size in 1..=SLAB_MAX {
        let c = class_of(size);
        assert!(class_size(c) >= size, "{size} does not fit class {c}");
        assert!(c == 0 || class_size(c - 1) < size, "{size} fits a smaller class than {c}");
        let waste = class_size(c) - size;
        assert!(
            if size <= 2048 { waste < 256 } else { waste * 8 <= size },
            "{size} wastes {waste}"
        );
    }
}
