//! Models of the trace ring: loom runs its writers and readers.

use super::*;
use leasehold_core::sync::{Arc, thread};

/// Two writers on a ring of one slot and a reader: what is read is one writer's event, whole;
/// nothing is counted twice.
#[test]
fn no_event_is_torn() {
    let mut model = loom::model::Builder::new();
    // Five words a side: all interleavings would take hours.
    model.preemption_bound = Some(2);
    model.check(|| {
        let ring = Arc::new(Ring::new(1).unwrap());
        let writers: Vec<_> = (1..3u64)
            .map(|i| {
                let ring = ring.clone();
                thread::spawn(move || {
                    ring.record(EventKind::Alloc, i, i * 10, i * 100, i as u16, i as u32)
                })
            })
            .collect();
        for e in ring.read().0 {
            assert_eq!((e.addr, e.size), (e.id * 10, e.id * 100));
        }
        for w in writers {
            w.join().unwrap();
        }
        let (events, lost) = ring.read();
        assert_eq!(events.len() as u64 + lost, 2);
        for e in events {
            assert_eq!((e.addr, e.size), (e.id * 10, e.id * 100));
        }
    });
}
