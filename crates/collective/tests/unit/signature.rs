//! Lists of calls, without communicators.

use super::*;

fn call(kind: Kind, count: u64, scope: &str) -> Signature {
    let element = ElementType::F32;
    Signature { seq: 0, kind, element, count, captured: true, scope: Some(Name::new(scope)) }
}

#[test]
fn lists_agree_by_class_and_survive_the_store() {
    let sum = Kind::AllReduce(Reduce::Sum);
    let zero = [call(sum, 8, "a"), call(Kind::Send { to: 1 }, 3, "b"), call(sum, 9, "c")];
    let one = [call(Kind::Recv { from: 0 }, 3, "x"), call(sum, 8, "y"), call(sum, 9, "z")];
    let two = [call(sum, 8, "y"), call(sum, 9, "z")];
    let list = |calls: &[Signature]| {
        let calls: Vec<_> = (7..).zip(calls).collect();
        List::of_recording(7, &calls)
    };
    let [zero, one, two] = [list(&zero), list(&one), list(&two)];
    for (own, list, rank, other) in
        [(0, &zero, 1, &one), (1, &one, 0, &zero), (0, &zero, 2, &two), (2, &two, 1, &one)]
    {
        assert_eq!(List::parse(&other.text(usize::MAX)), *other);
        assert!(list.agrees(own, &other.summary(), rank), "{own} and {rank}");
        assert!(list.difference(own, other, (rank, false), "t").is_none(), "{own} and {rank}");
    }
    assert!(!two.agrees(1, &zero.summary(), 0), "rank 1 has not received");
    let lost = two.difference(1, &zero, (0, false), "t").unwrap().to_string();
    assert!(lost.contains("t #0 from 0 to 1: rank 0 send 3 f32 to 1 (b); rank 1 has no"), "{lost}");
    assert_eq!(zero.text(30).lines().count(), 1, "a line is whole or not there");
}

#[test]
fn orders_are_opposite_between_communicators_and_within_one_recording_only() {
    let sum = call(Kind::AllReduce(Reduce::Sum), 8, "s");
    let (send, recv) = (call(Kind::Send { to: 1 }, 3, "b"), call(Kind::Recv { from: 0 }, 3, "x"));
    let of = |recording, calls: &[(u64, &Signature)]| List::of_recording(recording, calls);
    let difference = |a: [&List; 2], b: [&List; 2]| {
        List::opposite_orders([4, 6], &[("a", [0, 1], a), ("b", [0, 1], b)]).map(|e| e.to_string())
    };
    let (first, second) = (of(5, &[(5, &sum)]), of(5, &[(6, &sum)]));
    let found = difference([&first, &second], [&second, &first]).unwrap();
    for words in ["rank 4 a #0 all_reduce 8 f32 Sum (s) before b #0", "rank 6 b #0", "a and b"] {
        assert!(found.contains(words), "{words}: {found}");
    }
    assert_eq!(difference([&first, &first], [&second, &second]), None);
    // The other rank has them in recordings of their own.
    assert_eq!(difference([&first, &of(8, &[(8, &sum)])], [&second, &first]), None);
    // A group is at one place, so its calls have no order among each other.
    let group = of(5, &[(6, &sum), (6, &send)]);
    let calls = of(5, &[(6, &recv), (8, &sum)]);
    assert_eq!(difference([&first, &first], [&group, &calls]), None);
    let between = of(5, &[(7, &sum)]);
    let found = difference([&first, &between], [&group, &calls]).unwrap();
    assert!(found.contains("rank 6 b #0 recv 3 f32 from 0 (x) before a #0"), "{found}");
    // Sends between other ranks have no part in it.
    let others = call(Kind::Send { to: 2 }, 3, "o");
    assert_eq!(difference([&second, &first], [&of(5, &[(5, &others)]), &second]), None);
}
