//! The lists of records: a scope's records, and the records of one object in one thread.
//!
//! This module must not know counts: it neither registers nor releases.

use crate::local::{Local, Record};
use crate::table::{Entry, FOREIGN, NIL};

impl Local {
    /// A free record; `None` without memory.
    #[inline(always)]
    pub(crate) fn new_record(&self) -> Option<u32> {
        let free = self.free_record.get();
        if let Some(next) = self.records.read(free, |x| x.down) {
            self.free_record.set(next);
            return Some(free);
        }
        let blank = Record { addr: 0, generation: 0, older: NIL, up: NIL, down: NIL, depth: 0 };
        let index = self.records.len();
        (index < NIL && self.records.push(blank)).then_some(index)
    }

    /// Frees record `r`, which is in no list.
    #[inline(always)]
    pub(crate) fn free_record(&self, r: u32) {
        self.records.update(r, |record| {
            record.addr = 0;
            record.down = self.free_record.get();
        });
        self.free_record.set(r);
    }

    /// Fills record `r` and makes it the newest of scope `depth`.
    #[inline(always)]
    pub(crate) fn link(&self, r: u32, addr: usize, generation: u64, older: u32, depth: u32) {
        let Some(below) = self.marks.read(depth - 1, |mark| mark.head) else { return };
        self.records
            .update(r, |x| *x = Record { addr, generation, older, up: NIL, down: below, depth });
        if below != NIL {
            self.records.update(below, |x| x.up = r);
        }
        self.marks.update(depth - 1, |mark| mark.head = r);
    }

    /// Takes record `r` out of its scope's list.
    #[inline(always)]
    pub(crate) fn unlink(&self, r: u32) {
        let Some((up, down, depth)) = self.records.read(r, |x| (x.up, x.down, x.depth)) else {
            return;
        };
        if up == NIL {
            self.marks.update(depth - 1, |mark| mark.head = down);
        } else {
            self.records.update(up, |above| above.down = down);
        }
        if down != NIL {
            self.records.update(down, |below| below.up = up);
        }
    }

    /// This thread's newest record of an entry's object: [`NIL`] if it has none.
    #[inline(always)]
    pub(crate) fn newest(&self, entry: &Entry) -> u32 {
        if entry.owner == self.me {
            entry.newest
        } else if entry.flags & FOREIGN != 0 {
            let r = self.foreign.borrow().get(&entry.addr).copied().unwrap_or(NIL);
            // A record of a former life at this address is void.
            if self.records.read(r, |x| x.generation) == Some(entry.generation) { r } else { NIL }
        } else {
            NIL
        }
    }

    /// Makes `r` this thread's newest record of an entry's object.
    #[inline(always)]
    pub(crate) fn set_newest(&self, entry: &mut Entry, r: u32) {
        if entry.owner == self.me || (entry.owner == 0 && entry.flags & FOREIGN == 0) {
            entry.newest = r;
            entry.owner = if r == NIL { 0 } else { self.me };
        } else {
            self.set_newest_foreign(entry, r);
        }
    }

    #[cold]
    fn set_newest_foreign(&self, entry: &mut Entry, r: u32) {
        let mut foreign = self.foreign.borrow_mut();
        if r == NIL {
            foreign.remove(&entry.addr);
        } else if foreign.try_reserve(1).is_ok() {
            foreign.insert(entry.addr, r);
            entry.flags |= FOREIGN;
        }
    }

    /// Takes `r` out of the chain of `entry`.
    #[inline(always)]
    pub(crate) fn unchain(&self, entry: &mut Entry, r: u32) {
        let Some(older) = self.records.read(r, |x| x.older) else { return };
        let newest = self.newest(entry);
        if newest == r {
            self.set_newest(entry, older);
            return;
        }
        let mut at = newest;
        while let Some(next) = self.records.read(at, |x| x.older) {
            if next == r {
                self.records.update(at, |x| x.older = older);
                return;
            }
            at = next;
        }
    }
}
