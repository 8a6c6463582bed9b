//! The search for cycles, without a world.

use super::*;
use std::cell::RefCell;

/// The communicators `a` and `b` of two ranks with one order: so many of their calls are over,
/// and the rank stands in the next one of the last communicator.
fn standing(other: u32, calls: [(&str, u64); 2]) -> Vec<Standing> {
    let state = |(i, (key, over)): (usize, (&str, u64))| {
        let call = format!("{key} all {over}");
        let shown = format!("{key} #{over} barrier");
        let meeting = Meeting { at: 0, call: [call.clone(), call], ranks: vec![other], shown };
        let ready = if i == 1 { vec![((i as u16, over), vec![meeting])] } else { Vec::new() };
        Standing { order: (5, false), over: vec![(format!("{key} all"), over)], ready }
    };
    calls.into_iter().enumerate().map(state).collect()
}

/// Two ranks that look in turn, and their records.
struct Two {
    lookers: [Looker; 2],
    told: RefCell<BTreeMap<u32, String>>,
    now: Instant,
}

impl Two {
    fn new() -> Self {
        let (lookers, told) = (Default::default(), RefCell::default());
        Self { lookers, told, now: Instant::now() }
    }

    fn look(&mut self, rank: u32, calls: [(&str, u64); 2]) -> Option<Cycle> {
        self.now += LONGEST;
        let told = &self.told;
        let tell = |text: &str| {
            told.borrow_mut().insert(rank, text.to_owned());
            Ok(())
        };
        let load = |other| Ok(told.borrow().get(&other).cloned());
        let state = |_| standing(1 - rank, calls);
        self.lookers[rank as usize].look(self.now, rank, state, tell, load).unwrap()
    }
}

#[test]
fn ranks_that_stand_crosswise_are_a_cycle_once_both_have_said_so_again() {
    let mut two = Two::new();
    let mut found = None;
    let (mut rounds, crossed) = (0, [[("b", 3), ("a", 7)], [("a", 7), ("b", 3)]]);
    while found.is_none() {
        rounds += 1;
        assert!(rounds < 10, "no cycle");
        found = two.look(0, crossed[0]).or_else(|| two.look(1, crossed[1]));
    }
    assert!(rounds > 3, "records of one time were taken for those of two");
    let Cycle { keys, text } = found.unwrap();
    assert_eq!(keys.into_iter().collect::<Vec<_>>(), ["a", "b"]);
    let chain = "rank 0 waits in a #7 barrier for rank 1, which waits in b #3 barrier for rank 0";
    assert!(text.contains(chain), "{text}");
}

#[test]
fn a_record_of_a_rank_that_has_gone_on_is_no_part_of_a_cycle() {
    let mut two = Two::new();
    for _ in 0..3 {
        two.look(0, [("b", 3), ("a", 7)]);
    }
    // Rank 0 has gone on since, and says nothing.
    for _ in 0..20 {
        assert!(two.look(1, [("a", 7), ("b", 3)]).is_none());
    }
}

#[test]
fn a_rank_that_has_made_the_call_holds_nobody_up() {
    let mut two = Two::new();
    for _ in 0..20 {
        // Rank 1's part of rank 0's call is over.
        assert!(two.look(0, [("b", 3), ("a", 7)]).is_none());
        assert!(two.look(1, [("a", 8), ("b", 3)]).is_none());
    }
    for _ in 0..20 {
        // Both stand in one call.
        assert!(two.look(0, [("a", 8), ("b", 3)]).is_none());
        assert!(two.look(1, [("a", 8), ("b", 3)]).is_none());
    }
}

#[test]
fn records_survive_the_store() {
    let stands = Stand::all(&standing(1, [("b", 3), ("a", 7)]));
    let read = parse(&record(9, &stands)).unwrap();
    assert_eq!((read.0, record(9, &read.1), stands.len()), (9, record(9, &stands), 1));
    // Two submissions that are ready have no order.
    let mut loose = standing(1, [("b", 3), ("a", 7)]);
    loose[0].ready = vec![((8, 8), Vec::new())];
    assert!(Stand::all(&loose).is_empty());
}
