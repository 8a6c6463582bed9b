//! Tests of the block table.

use super::*;

/// The rows of a page are of one list and go back to it, whichever thread takes and gives them.
#[test]
fn rows_of_a_page_stay_together() {
    let (table, mut vacant) = (Table::new(0), Vacant::new());
    let mut held: Vec<u32> = Vec::new();
    for round in 0..50usize {
        // Another thread each time, and so another list.
        let me = round as u32;
        let mut take = || table.take_for(me, &mut vacant).expect("a row").header.index();
        held.extend((0..40).map(|_| take()));
        for i in (0..30).rev() {
            let row = held.swap_remove((i * 7 + round) % held.len());
            table.put(&mut vacant, table.get(row).expect("a row"));
        }
    }
    let used = vacant.fresh.start;
    let list = |row: u32| table.get(row).expect("a row").list.load(Ordering::Relaxed);
    assert!((0..used).all(|row| list(row) == list(row / PAGE * PAGE)));
    assert!((1..used / PAGE).any(|page| list(page * PAGE) != list(0)), "there are several lists");
    for (name, rows) in vacant.lists.iter_mut().enumerate() {
        // SAFETY: rows of the table.
        while let Some(row) = unsafe { rows.pop() } {
            assert_eq!(usize::from(list(row.header.index())), name);
        }
    }
    assert_eq!(vacant.live as usize, held.len());
}
