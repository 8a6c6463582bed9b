//! Registration and reference counts: `register_*`, `unregister`, `promote`, `acquire`, `dec_ref`.
//! `destroy.rs` has the release.
//!
//! This module must not know how an object is destroyed.

use crate::local::Local;
use crate::misuse::Misuse;
use crate::pool::OpaqueTensor;
use crate::table::{Entry, EntryState, FOREIGN, Guard, Kind, NIL, PINNED};

/// The properties that a registration gives an object beside its address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct About {
    pub(crate) kind: Kind,
    pub(crate) name: u32,
    pub(crate) size: u64,
    pub(crate) destructor: usize,
}

impl About {
    pub(crate) fn kind(kind: Kind) -> Self {
        Self { kind, name: 0, size: 0, destructor: 0 }
    }
}

impl Local {
    // ---- register, unregister

    /// Counts the object once and records it in the current scope.
    #[inline(always)]
    pub(crate) fn register(&self, addr: usize, about: About) {
        if addr == 0 {
            return;
        }
        if self.logs() {
            self.log_register(addr, about);
        }
        let depth = self.depth();
        let Some(r) = self.new_record().filter(|_| depth > 0) else {
            self.misuse(Misuse::OutOfMemory, addr, 0);
            return;
        };
        let mut shard = self.shared.table.lock(addr);
        if let Some(at) = shard.position(addr) {
            self.register_again(shard, at, r, about);
            return;
        }
        let inserted = shard.insert(addr, about.kind, |entry| {
            entry.size = about.size;
            entry.destructor = about.destructor;
            entry.name = about.name;
            entry.newest = r;
            entry.owner = self.me;
        });
        drop(shard);
        match inserted {
            Ok(generation) => {
                self.link(r, addr, generation, NIL, depth);
                self.count_created();
                if about.size != 0 {
                    self.shared.add_live_bytes(about.size as i64);
                }
            }
            Err(_) => {
                self.free_record(r);
                self.misuse(Misuse::OutOfMemory, addr, 0);
            }
        }
    }

    #[cold]
    fn log_register(&self, addr: usize, about: About) {
        if let Some(log) = &self.shared.log {
            let name = crate::names::name(about.name);
            let event =
                format_args!("op=register kind={:?} ptr={addr:#x} name={name:?}", about.kind);
            log.line(self.me, self.depth(), event);
        }
    }

    /// Registers an address that has an entry already, at position `at`.
    fn register_again(&self, mut shard: Guard<'_>, at: u32, r: u32, about: About) {
        let entry = shard.at(at);
        let addr = entry.addr;
        if entry.state != EntryState::Live {
            // `pool_or_destroy` has recorded the place of a pooled tensor.
            let (state, pool_shard) = (entry.state, entry.newest);
            drop(shard);
            self.register_dead(addr, state, pool_shard, r);
            return;
        }
        let mut mismatch = false;
        if entry.kind == Kind::Untyped && about.kind != Kind::Untyped {
            let before = *entry;
            entry.kind = about.kind;
            entry.size = about.size;
            entry.destructor = about.destructor;
            let after = *entry;
            shard.reclassify(&before, &after);
            self.shared.add_live_bytes(after.size as i64);
        } else {
            mismatch = entry.kind != about.kind && about.kind != Kind::Untyped;
        }
        let entry = shard.at(at);
        if about.name != 0 {
            entry.name = about.name;
        }
        if entry.count < PINNED {
            entry.count += 1;
        }
        let generation = entry.generation;
        let older = self.newest(entry);
        self.set_newest(entry, r);
        drop(shard);
        self.link(r, addr, generation, older, self.depth());
        if mismatch {
            self.misuse(Misuse::KindMismatch, addr, about.kind as i64);
        }
    }

    /// Registers a tensor whose count had reached zero: it lives again unless another owner has it
    /// by now.
    #[cold]
    fn register_dead(&self, addr: usize, state: EntryState, pool_shard: u32, r: u32) {
        let ours = match state {
            EntryState::Dying | EntryState::Quarantined | EntryState::Live => true,
            // A hook of this or another thread is describing the tensor; this step cannot be
            // reversed.
            EntryState::Described => false,
            EntryState::Pooled => {
                let tensor = std::ptr::with_exposed_provenance_mut::<OpaqueTensor>(addr);
                self.shared.pools.take(tensor, pool_shard as usize)
            }
        };
        let mut shard = self.shared.table.lock(addr);
        let revived = if ours && shard.find(addr).is_some_and(|e| e.state == state) {
            shard.revive(addr)
        } else {
            None
        };
        if let Some(entry) = shard.find(addr)
            && revived.is_some()
        {
            entry.flags &= !FOREIGN;
            self.set_newest(entry, r);
            self.shared.add_live_bytes(entry.size as i64);
        }
        drop(shard);
        match revived {
            Some(generation) => {
                self.link(r, addr, generation, NIL, self.depth());
                self.count_created();
            }
            None => self.free_record(r),
        }
        self.misuse(Misuse::RegisterDead, addr, i64::from(revived.is_some()));
    }

    /// Registers a known object again, with its kind.
    pub(crate) fn register_known(&self, addr: usize) {
        if addr == 0 {
            return;
        }
        let known = self.shared.table.lock(addr).find(addr).is_some();
        if known {
            self.register(addr, About::kind(Kind::Untyped));
        } else {
            self.misuse(Misuse::RegisterUnknown, addr, 0);
        }
    }

    /// Removes the newest record of this thread, if it lies at depth `outermost` or above. The
    /// count stays.
    pub(crate) fn unregister(&self, addr: usize, outermost: u32) {
        if addr == 0 {
            return;
        }
        if self.logs() {
            self.log("unregister", addr, 0);
        }
        let mut shard = self.shared.table.lock(addr);
        if let Some(entry) = shard.find(addr).filter(|e| e.state == EntryState::Live) {
            let r = self.newest(entry);
            if let Some(record) = self.records.get(r).filter(|x| x.depth >= outermost) {
                self.set_newest(entry, record.older);
                drop(shard);
                self.unlink(r);
                self.free_record(r);
                return;
            }
        }
        drop(shard);
        self.misuse(Misuse::NotRegistered, addr, 0);
    }

    /// Returns whether any scope of this thread has a record of the object.
    pub(crate) fn is_registered(&self, addr: usize) -> bool {
        if addr == 0 {
            return false;
        }
        let mut shard = self.shared.table.lock(addr);
        shard.find(addr).is_some_and(|e| e.state == EntryState::Live && self.newest(e) != NIL)
    }

    /// Moves one record of the object from the current scope to its parent, as the newest there. If
    /// the object's newest record lies further out, the object already outlives the current scope,
    /// and nothing happens.
    pub(crate) fn promote(&self, addr: usize) {
        if addr == 0 {
            return;
        }
        if self.logs() {
            self.log("promote", addr, 0);
        }
        let depth = self.depth();
        let mut shard = self.shared.table.lock(addr);
        let newest = match shard.find(addr).filter(|e| e.state == EntryState::Live) {
            Some(entry) => self.newest(entry),
            None => NIL,
        };
        let Some(record) = self.records.get(newest).filter(|_| depth > self.base_depth.get())
        else {
            drop(shard);
            self.misuse(Misuse::NotRegistered, addr, i64::from(depth));
            return;
        };
        if record.depth < depth {
            return;
        }
        // The chain runs from inner scopes to outer ones: the record goes after the last one of
        // this scope.
        let mut last = newest;
        while let Some(x) = self.records.get(last)
            && self.records.get(x.older).is_some_and(|older| older.depth == depth)
        {
            last = x.older;
        }
        let mut older = record.older;
        if last != newest {
            if let Some(entry) = shard.find(addr) {
                self.set_newest(entry, record.older);
            }
            older = self.records.get(last).map_or(NIL, |x| x.older);
            self.records.update(last, |x| x.older = newest);
        }
        drop(shard);
        self.unlink(newest);
        self.link(newest, addr, record.generation, older, depth - 1);
    }

    // ---- counts

    /// Adds a count. An unknown address becomes an untyped entry with `initial` counts.
    #[inline(always)]
    pub(crate) fn acquire(&self, addr: usize, initial: u32) {
        if addr == 0 {
            return;
        }
        if self.logs() {
            self.log("acquire", addr, 0);
        }
        let mut shard = self.shared.table.lock(addr);
        let Some(at) = shard.position(addr) else {
            self.acquire_unknown(shard, addr, initial);
            return;
        };
        let entry = shard.at(at);
        if entry.state != EntryState::Live {
            drop(shard);
            self.misuse(Misuse::UseOfDead, addr, 1);
        } else if entry.count < PINNED {
            entry.count += 1;
        }
    }

    #[cold]
    fn acquire_unknown(&self, mut shard: Guard<'_>, addr: usize, initial: u32) {
        let fill = |entry: &mut Entry| {
            entry.count = initial;
        };
        let inserted = shard.insert(addr, Kind::Untyped, fill).is_ok();
        drop(shard);
        if inserted {
            self.count_created();
        } else {
            self.misuse(Misuse::OutOfMemory, addr, 0);
        }
    }

    /// Removes a count; at zero the table removes the object, and the caller must free it (`true`).
    pub(crate) fn dec_ref(&self, addr: usize) -> bool {
        if addr == 0 {
            return false;
        }
        if self.logs() {
            self.log("dec_ref", addr, 0);
        }
        let mut shard = self.shared.table.lock(addr);
        let Some(at) = shard.position(addr) else {
            drop(shard);
            self.misuse(Misuse::ReleaseUnknown, addr, 0);
            return true;
        };
        let entry = shard.at(at);
        if entry.state != EntryState::Live {
            drop(shard);
            self.misuse(Misuse::UseOfDead, addr, -1);
            return false;
        }
        if entry.count > 1 {
            if entry.count < PINNED {
                entry.count -= 1;
            }
            return false;
        }
        let size = entry.size;
        shard.remove_at(at);
        drop(shard);
        self.count_destroyed();
        self.shared.add_live_bytes(-(size as i64));
        true
    }
}
