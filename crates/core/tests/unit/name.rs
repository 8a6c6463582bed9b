//! Tests of names and scopes.

use super::*;

#[test]
fn a_name_is_cut_between_characters_and_has_no_control_characters() {
    let name = Name::new(&format!("a\nb\u{1b}[2J{}", "ü".repeat(100)));
    assert!(name.as_str().starts_with("a?b?[2Jüü"), "{name}");
    assert!((LONGEST - 1..=LONGEST).contains(&name.as_str().len()), "{name}");
}

#[test]
fn scopes_nest_and_belong_to_their_thread() {
    let (outer, inner) = (Name::new("outer"), Name::new("inner"));
    let scope = outer.clone().scope();
    {
        let _scope = inner.clone().scope();
        assert_eq!(Name::current(), Some(inner));
        std::thread::scope(|s| {
            s.spawn(|| assert_eq!(Name::current(), None));
        });
    }
    assert_eq!(Name::current(), Some(outer));
    drop(scope);
    assert_eq!(Name::current(), None);
}

#[test]
fn no_word_but_a_known_name_is_a_name() {
    assert_eq!(Name::from_tag(7), None);
    assert_eq!(Name::from_tag(TAG_IS_NAME), None);
    assert_eq!(Name::from_tag(u32::MAX), None);
    let name = Name::new("known");
    assert_eq!(Name::from_tag(name.tag()), Some(name));
}

#[test]
fn names_do_not_run_out_and_those_that_something_has_stay() {
    let held_by_cell = NameCell::default();
    held_by_cell.set_name(Some("held by a cell".into()));
    let held = Name::new("held by a value");
    let past = Name::new("held by nothing").tag();
    let before = table().lock().places.len();
    for i in 0..3 * KEPT {
        let (text, cell) = (format!("request {i}"), NameCell::default());
        let name = Name::new(&text);
        assert_eq!(name.as_str(), text);
        cell.set_name(Some(name));
        assert_eq!(cell.name().map(|n| n.as_str().to_owned()), Some(text));
    }
    assert!(table().lock().places.len() <= KEPT.max(before) + LOOKS, "the table is bounded");
    assert_eq!(held_by_cell.name(), Some(Name::new("held by a cell")));
    assert_eq!(Name::from_tag(held.tag()), Some(held));
    assert_eq!(Name::from_tag(past), None);
    assert_eq!(ShownTag(past).to_string(), "a name of the past");
    // Names that are held make the table grow.
    let many: Vec<Name> = (0..KEPT + 100).map(|i| Name::new(&format!("live {i}"))).collect();
    assert!(many.iter().enumerate().all(|(i, n)| n.as_str() == format!("live {i}")));
    assert!(many.iter().all(|n| Name::from_tag(n.tag()).as_ref() == Some(n)));
}

#[test]
fn a_cell_changes_on_many_threads_and_counts_right() {
    let cell = NameCell::default();
    std::thread::scope(|s| {
        for t in 0..4 {
            let cell = &cell;
            s.spawn(move || {
                for i in 0..1000 {
                    cell.set_name((i % 3 > 0).then(|| Name::new(&format!("cell {t} {}", i % 7))));
                }
            });
        }
    });
    cell.set(0);
    for t in 0..4 {
        for i in 0..7 {
            let place = Name::new(&format!("cell {t} {i}")).tag() as usize % MOST;
            assert_eq!(super::held(place).load(Ordering::Relaxed), 0);
        }
    }
}

#[test]
fn threads_that_give_one_text_get_one_name() {
    std::thread::scope(|s| {
        let all: Vec<_> = (0..4)
            .map(|_| s.spawn(|| (0..300).map(|i| Name::new(&format!("n{i}"))).collect()))
            .collect();
        let all: Vec<Vec<Name>> = all.into_iter().map(|t| t.join().unwrap()).collect();
        assert!(all.windows(2).all(|w| w[0] == w[1]));
        assert!(all[0].iter().enumerate().all(|(i, n)| n.as_str() == format!("n{i}")));
    });
}
