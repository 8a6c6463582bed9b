//! Tests of the trace ring.

use super::*;

#[test]
fn the_newest_events_are_kept_in_order() {
    let ring = Ring::new(8).unwrap();
    for i in 0..20 {
        ring.record(EventKind::Alloc, i, 100 + i, 200 + i, i as u16, i as u32);
    }
    let (events, lost) = ring.read();
    assert_eq!(lost, 12);
    assert_eq!(events.iter().map(|e| e.id).collect::<Vec<_>>(), (12..20).collect::<Vec<_>>());
    for e in events {
        let i = e.id;
        assert_eq!(
            (e.addr, e.size, u64::from(e.stream), u64::from(e.tag)),
            (100 + i, 200 + i, i, i)
        );
    }
}

#[test]
fn a_ring_of_more_events_than_there_is_room_for_is_refused() {
    for more in [MOST_EVENTS + 1, u32::MAX as usize, usize::MAX] {
        let refused = Ring::new(more).err().unwrap();
        assert!(matches!(refused, Error::InvalidArgument(_)), "{refused}");
        assert!(refused.to_string().contains("16777216"), "{refused}");
    }
}

#[test]
fn threads_write_while_somebody_reads_and_no_event_is_torn() {
    let ring = Ring::new(64).unwrap();
    std::thread::scope(|s| {
        for t in 0..3u64 {
            let ring = &ring;
            s.spawn(move || {
                for i in 0..5000u64 {
                    let id = t << 32 | i;
                    ring.record(
                        EventKind::Free,
                        id,
                        id ^ 0x5555,
                        id.wrapping_mul(3),
                        t as u16,
                        i as u32,
                    );
                }
            });
        }
        for _ in 0..200 {
            for e in ring.read().0 {
                assert_eq!((e.addr, e.size), (e.id ^ 0x5555, e.id.wrapping_mul(3)), "{e:?}");
                assert_eq!(
                    (u64::from(e.stream), u64::from(e.tag)),
                    (e.id >> 32, e.id & 0xFFFF_FFFF)
                );
            }
        }
    });
    let (events, lost) = ring.read();
    assert_eq!(events.len() as u64 + lost, 15_000);
    assert!(!events.is_empty());
}
