//! Tests of the way from an address to its buffer.

use crate::fake::FakeBacking;
use crate::{Allocator, AllocatorConfig, Layout, On, Protection};
use leasehold_core::{Result, TimelineOwner, TimelineSource, Timepoint};
use std::time::Duration;

struct Idle(TimelineOwner);

// SAFETY: nothing is ever submitted to it.
unsafe impl TimelineSource for Idle {
    fn timeline(&self) -> &'static leasehold_core::Timeline {
        self.0.timeline()
    }
    fn signal(&self) -> Result<u64> {
        Ok(0)
    }
    fn refresh(&self) -> Result<u64> {
        Ok(0)
    }
    fn wait(&self, _: Timepoint) -> Result<()> {
        Ok(())
    }
    fn wait_host(&self, _: u64, _: Option<Duration>) -> Result<()> {
        Ok(())
    }
}

#[test]
fn every_byte_of_a_buffer_leads_to_it_among_many() {
    let stream = Idle(TimelineOwner::take().unwrap());
    let allocator =
        Allocator::new(Box::new(FakeBacking::new(1 << 32)), AllocatorConfig::default()).unwrap();
    let mut held = Vec::new();
    for i in 0..3000u64 {
        // Slots, small blocks of their own (aligned), blocks over many leaves.
        let layout = match i % 5 {
            0 => Layout::new(1 + i * 7 % 60_000),
            1 => Layout::aligned(1 + i % 700, 512 << (i % 4)),
            2 => Layout::new(65_000 + i * 37),
            3 => Layout::aligned(1 + i, 64 << 10),
            _ => Layout::new((i % 11) << 20),
        };
        held.push(allocator.alloc(layout, On::new(&stream)).unwrap());
        if i % 3 == 0 {
            drop(held.swap_remove((i * 7919) as usize % held.len()));
        }
    }
    for b in held.iter().filter(|b| !b.is_empty()) {
        for at in [0, 1, b.len() / 3, b.len() / 2, b.len() - 1] {
            let found = allocator.holding(b.addr() + at, 1, u32::MAX).expect("a live buffer");
            assert_eq!((found.addr, found.len, found.row), (b.addr(), b.len(), b.handle().index()));
        }
    }
    let gone: Vec<u64> = held.iter().filter(|b| !b.is_empty()).map(|b| b.addr()).collect();
    held.clear();
    assert!(gone.iter().all(|&at| allocator.holding(at, 1, u32::MAX).is_none()));
}

#[test]
fn a_range_is_held_only_as_long_as_its_buffer_and_only_within_it() {
    let stream = Idle(TimelineOwner::take().unwrap());
    let allocator =
        Allocator::new(Box::new(FakeBacking::new(1 << 30)), AllocatorConfig::default()).unwrap();
    let a = allocator.alloc(Layout::new(1000), On::new(&stream)).unwrap();
    let b = allocator.alloc(Layout::new(70_000), On::new(&stream)).unwrap();
    for (buffer, len) in [(&a, 1000), (&b, 70_000)] {
        let at = buffer.addr();
        let found = allocator.holding(at, len, u32::MAX).unwrap();
        assert_eq!((found.addr, found.len), (at, len));
        assert_eq!(allocator.holding(at + len - 1, 1, found.row), Some(found));
        assert_eq!(allocator.holding(at, len + 1, found.row), None);
        assert_eq!(allocator.holding(at + len, 1, 0), None);
    }
    assert_eq!(allocator.holding(u64::MAX, 2, 0), None);
    let at = b.addr();
    drop(b);
    assert_eq!(allocator.holding(at, 1, 1), None);
    // SAFETY: the allocator's fake memory is never touched.
    let import =
        unsafe { allocator.import(0x10_0000, 64, 7, Protection::ReadWrite, Box::new(())) }.unwrap();
    assert_eq!(allocator.holding(0x10_0010, 16, 0).unwrap().native, 7);
    drop(import);
    assert_eq!(allocator.holding(0x10_0010, 16, 0), None);
}
