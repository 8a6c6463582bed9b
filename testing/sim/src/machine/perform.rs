//! The effect of one action: kernels, copies, fills, words, semaphores and frees.

use super::clock::Clock;
use super::command::{Action, Done, Entry, FillCall, KernelCall, Transfer};
use super::conditional::Condition;
use super::detect::{Operation, ReportKind, Unwritten};
use super::space::{AccessPart, AccessScope, STORE};
use super::step::{CommandContext, Outcome};
use super::{KernelBody, Launch, MachineState, QueueId};
use leasehold_core::panics::caught;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{Error, Fault};
use leasehold_hal::{Access, Binding};
use std::task::Poll;

/// Parts of a binding, and the memories that contain them.
#[derive(Default)]
struct Reads(Vec<(u64, u64)>, Vec<AccessPart>);

/// The memory of a binding.
struct Reached {
    /// Its parts that a kernel may touch: bytes from its beginning, and bytes.
    windows: Vec<(u64, u64)>,
    /// Those of a binding with writes that it must not write, because they are shared.
    shared: Reads,
    /// The memories that contain them.
    parts: Vec<AccessPart>,
}

impl MachineState {
    /// Executes an action.
    pub(super) fn perform(&mut self, place: &mut CommandContext, action: Action) -> Outcome {
        match action {
            Action::Kernel(call) => self.kernel(place, call),
            Action::Copy(c) => result(self.copy(place, c), COPY_NANOS + c.bytes() / 16),
            Action::Fill(c) => {
                result(self.fill(place, c), COPY_NANOS + c.width.saturating_mul(c.rows) / 32)
            }
            Action::Host { call, .. } => Outcome::Call(call),
            Action::Node { call, .. } => {
                let queue = place.queue;
                Outcome::Call(Box::new(move || call(queue)))
            }
            Action::Record(mark) => {
                if let Some(q) = self.queues.get(&place.queue) {
                    // This is the mark's only record, so the cell is empty.
                    drop(mark.done.set(Done {
                        nanos: q.nanos,
                        clock: q.clock.clone(),
                        failed: false,
                    }));
                }
                Outcome::Done(0)
            }
            Action::WaitMark(mark) => {
                if let Some(done) = mark.done.get() {
                    self.learn(place.queue, &done.clock, done.nanos);
                }
                Outcome::Done(0)
            }
            Action::RequireMark(mark) => {
                let Some(done) = mark.done.get() else { return Outcome::Done(0) };
                self.learn(place.queue, &done.clock, done.nanos);
                if done.failed {
                    return Outcome::Fail(Error::state("the work that it waits for has failed"));
                }
                Outcome::Done(0)
            }
            Action::WriteValue { addr, value } => result(self.write_value(place, addr, value), 100),
            Action::WaitValue { addr, value } => self.wait_value(place, addr, value),
            Action::Signal(s, value) | Action::SignalOnSuccess(s, value) => {
                let MachineState { queues, semaphores, .. } = self;
                if let Some((q, s)) = queues.get(&place.queue).zip(semaphores.get_mut(&s)) {
                    s.signal(value, q.clock.clone(), q.nanos);
                }
                Outcome::Done(0)
            }
            Action::WaitSemaphore(id, value) => self.wait_semaphore(place, id, value),
            Action::Until { name, mut ready } => {
                let Some(answer) = ready() else {
                    return Outcome::Pending(Action::Until { name, ready });
                };
                self.trash.push(Box::new(ready));
                if let Err(e) = answer {
                    return Outcome::Fail(e);
                }
                let (clock, nanos) = (self.host.clone(), self.host_nanos);
                self.learn(place.queue, &clock, nanos);
                Outcome::Done(0)
            }
            Action::Meet(meet) => self.meet(place, meet),
            Action::Test(_, condition) => self.test(place, &condition),
            Action::Free(addr) => {
                self.free_here(place, addr);
                Outcome::Done(0)
            }
            Action::Allocated { addr } => {
                if let Ok(gone) = self.space.allocation(addr) {
                    self.detector.allocate(&place.actor(), gone.key, addr, gone.bytes);
                }
                Outcome::Done(0)
            }
            Action::Graph(_) | Action::Empty => Outcome::Done(0),
        }
    }

    /// A queue learns another agent's clock.
    pub(super) fn learn(&mut self, queue: QueueId, clock: &Clock, nanos: u64) {
        if let Some(q) = self.queues.get_mut(&queue) {
            q.clock.join(clock);
            q.nanos = q.nanos.max(nanos);
        }
    }

    /// The host address of a range. A range that was freed or reused since the enqueue is reported.
    pub(super) fn reach(
        &mut self,
        place: &CommandContext,
        who: AccessScope,
        addr: u64,
        bytes: u64,
        parts: &mut Vec<AccessPart>,
    ) -> Result<*mut u8, String> {
        parts.clear();
        let found = self.space.resolve(who, addr, bytes, parts);
        if !self.detector.on {
            return found;
        }
        let end = addr.saturating_add(bytes);
        // Sorted by address.
        let from = place.regions.partition_point(|r| r.0 < addr);
        let mut then = place.regions[from..].iter().take_while(|r| r.0 < end);
        let stale = match &found {
            Err(_) => then.next().is_some(),
            Ok(_) => then.any(|&(at, region)| {
                parts.iter().any(|p| p.region != region && p.addr <= at && at < p.addr + p.bytes)
            }),
        };
        if stale {
            self.detector.report(ReportKind::UseAfterFree, None, place.operation(), addr, bytes);
        }
        found
    }

    /// Tells the detector about an access.
    pub(super) fn note_access(
        &mut self,
        place: &CommandContext,
        parts: &[AccessPart],
        access: Access,
        unwritten: Unwritten,
    ) {
        if !self.detector.on {
            return;
        }
        if access.reads() {
            let device = parts.iter().filter(|p| p.key >= STORE);
            let (all, none) = device.fold((0, 0), |(all, none), p| {
                (all + p.bytes, none + self.detector.unwritten(p.key, p.bytes))
            });
            let told = match unwritten {
                Unwritten::Any => none != 0,
                Unwritten::All => none != 0 && none == all,
                Unwritten::Never => false,
            };
            if told {
                let addr = parts.first().map_or(0, |p| p.addr);
                self.detector.report(ReportKind::NeverWritten, None, place.operation(), addr, none);
            }
        }
        for p in parts {
            self.detector.access(&place.actor(), p.key, p.addr, p.bytes, access);
        }
    }

    fn kernel(&mut self, place: &CommandContext, call: KernelCall) -> Outcome {
        if let Err(ended) = self.units.check_alive(call.partition) {
            return Outcome::Fail(ended);
        }
        let blocks = call.grid.iter().fold(1u64, |n, &g| n.saturating_mul(u64::from(g)));
        if blocks == 0 {
            return Outcome::Done(KERNEL_NANOS);
        }
        let mut all: Vec<Reached> = Vec::with_capacity(call.bindings.len());
        let mut bindings: Vec<Binding> = Vec::with_capacity(call.bindings.len());
        for (i, b) in call.bindings.iter().enumerate() {
            let reached = match self.reach_binding(place, &call, i) {
                Ok(reached) => reached,
                Err(e) => return Outcome::Fault(format!("binding {i}: {e}")),
            };
            let at = if b.len == 0 { 0 } else { self.space.behind(b.addr) as u64 };
            bindings.push(Binding { addr: at, ..*b });
            all.push(reached);
        }
        let watched = self.watch(&call, &bindings, &all);
        let launch = Launch {
            name: &call.kernel.name,
            device: place.device,
            grid: call.grid,
            block: call.block,
            shared: call.shared,
            cluster: call.cluster,
            cooperative: call.cooperative,
            bindings: &bindings,
            given: &call.bindings,
            params: &call.params,
        };
        let ran = caught(|| match &call.kernel.spec.body {
            KernelBody::Run(f) => f(&launch).map(Poll::Ready),
            KernelBody::Poll(f) => f(&launch),
        });
        self.compare(place, &call, &bindings, watched);
        match ran {
            Ok(Ok(Poll::Pending)) => return Outcome::Pending(Action::Kernel(call)),
            Ok(Ok(Poll::Ready(()))) => {}
            Ok(Err(e)) => return Outcome::Fault(e.to_string()),
            Err(text) => return Outcome::Fault(text),
        }
        for (i, (Reached { parts, shared, .. }, b)) in all.iter().zip(&bindings).enumerate() {
            if b.access.reads() {
                self.note_access(place, &shared.1, Access::Read, Unwritten::Never);
            }
            if call.early >> i & 1 != 0 {
                for p in parts {
                    let early = place.early_actor();
                    self.detector.early(&early, place.operation(), p.key, p.addr, p.bytes);
                }
            }
            // A kernel that appends to memory that grows knows what it has written.
            let appends = call.limits_of(i).is_some() || call.kernel.spec.writes_first;
            let unwritten =
                if appends && b.access.writes() { Unwritten::Never } else { Unwritten::All };
            self.note_access(place, parts, b.access, unwritten);
        }
        let bytes: u64 = all.iter().flat_map(|r| &r.windows).map(|(_, len)| len).sum();
        let nanos = KERNEL_NANOS + blocks + bytes / 64 + self.rng.below(64) as u64;
        let ready = self.queues.get(&place.queue).map_or(0, |q| q.nanos);
        let end = self.units.occupy(place.device, call.partition, blocks, (ready, nanos));
        Outcome::Done(end - ready)
    }

    /// Resolves the memory of a launch's binding: all of it, or of each part what its limit says
    /// now.
    fn reach_binding(
        &mut self,
        place: &CommandContext,
        call: &KernelCall,
        i: usize,
    ) -> Result<Reached, String> {
        let b = &call.bindings[i];
        let (mut windows, mut shared) = (Vec::new(), Vec::new());
        match call.limits_of(i) {
            None => windows.push((0, b.len)),
            Some(limits) => {
                let (count, mut parts) = ((limits.len / 16).max(1), Vec::new());
                let all = (16 * count).min(limits.len.max(8));
                let at = self.space.resolve(AccessScope::Engine, limits.addr, all, &mut parts)?;
                let word = |number: u64| {
                    // SAFETY: the words were resolved to mapped bytes just now, and the lock keeps
                    // the mapping.
                    unsafe { at.cast::<u64>().add(number as usize).read_unaligned() }
                };
                for part in 0..count {
                    // One limit alone is of the whole binding.
                    let (begin, most) = (part * (b.len / count), b.len / count);
                    let limit = word(part).min(most);
                    let writes = b.access.writes() && 8 * (count + part) < all;
                    let own = if writes { word(count + part).min(limit) } else { 0 };
                    shared.push((begin, own));
                    windows.push((begin + own, limit - own));
                }
            }
        }
        let [Reads(windows, parts), shared] = [windows, shared].map(|mut windows| {
            windows.retain(|(_, len)| *len != 0);
            Reads(windows, Vec::new())
        });
        let mut reached = Reached { windows, parts, shared };
        for (windows, parts) in
            [(&reached.windows, &mut reached.parts), (&reached.shared.0, &mut reached.shared.1)]
        {
            for &(from, len) in windows {
                let mut own = Vec::new();
                let scope = AccessScope::Kernel(place.device);
                self.reach(place, scope, b.addr + from, len, &mut own)?;
                parts.append(&mut own);
            }
        }
        Ok(reached)
    }

    /// The content of a kernel's read-only bindings before it runs, by binding, and of what growing
    /// buffers share in bindings that it writes. Write-only bindings
    /// are poisoned, so that a kernel that reads them gets another result. The function skips
    /// polled kernels, host memory, and bindings that overlap a written one.
    fn watch(
        &self,
        call: &KernelCall,
        bindings: &[Binding],
        reached: &[Reached],
    ) -> Vec<(usize, u64, Vec<u8>)> {
        let mut read = Vec::new();
        if !self.detector.on || matches!(call.kernel.spec.body, KernelBody::Poll(_)) {
            return read;
        }
        for (i, b) in bindings.iter().enumerate().filter(|(_, b)| b.len != 0) {
            for &(from, len) in &reached[i].shared.0 {
                let at = std::ptr::with_exposed_provenance::<u8>((b.addr + from) as usize);
                // SAFETY: as for the windows below.
                let content = unsafe { std::slice::from_raw_parts(at, len as usize) };
                read.push((i, from, content.to_vec()));
            }
            if b.access == Access::ReadWrite {
                continue;
            }
            let own = reached[i].parts.iter().all(|p| p.key >= STORE);
            let shared = |(j, other): (usize, &Binding)| {
                j != i && (b.access.writes() || other.access.writes()) && b.overlaps(other)
            };
            if !own || bindings.iter().enumerate().any(shared) {
                continue;
            }
            for &(from, len) in &reached[i].windows {
                let at = std::ptr::with_exposed_provenance_mut::<u8>((b.addr + from) as usize);
                // SAFETY: the window was resolved to this many mapped bytes just now, and the lock
                // keeps the mapping. Queues run one at a time.
                unsafe {
                    if b.access == Access::Read {
                        let content = std::slice::from_raw_parts(at, len as usize).to_vec();
                        read.push((i, from, content));
                    } else if !call.kernel.spec.gaps {
                        at.write_bytes(self.detector.poison, len as usize);
                    }
                }
            }
        }
        read
    }

    /// Reports bindings that a kernel has written although it declares to read them.
    fn compare(
        &mut self,
        place: &CommandContext,
        call: &KernelCall,
        bindings: &[Binding],
        watched: Vec<(usize, u64, Vec<u8>)>,
    ) {
        for (i, window, before) in watched {
            let addr = bindings[i].addr + window;
            let at = std::ptr::with_exposed_provenance::<u8>(addr as usize);
            // SAFETY: these are the bytes that `watch` has read, under the same lock.
            let now = unsafe { std::slice::from_raw_parts(at, before.len()) };
            // Nearly always so, and without optimization a hundred times as fast as the search.
            if now == before.as_slice() {
                continue;
            }
            let differs = |(a, b): (&u8, &u8)| a != b;
            let Some(from) = std::iter::zip(now, &before).position(differs) else { continue };
            let to = std::iter::zip(now, &before).rposition(differs).map_or(from, |last| last + 1);
            let (from, bytes) = (window + from as u64, (to - from) as u64);
            let addr = call.bindings[i].addr + from;
            let kind = match bindings[i].access {
                Access::Read => ReportKind::WroteReadOnly,
                _ => ReportKind::WroteShared,
            };
            self.detector.wrote(kind, place.operation(), (i, from), addr, bytes);
        }
    }

    fn copy(&mut self, place: &CommandContext, c: Transfer) -> Result<(), String> {
        if c.width == 0 {
            return Ok(());
        }
        let (mut from, mut to) = (Vec::new(), Vec::new());
        for row in 0..c.rows {
            let src =
                self.reach(place, c.reach(), c.src + row * c.src_pitch, c.width, &mut from)?;
            let dst = self.reach(place, c.reach(), c.dst + row * c.dst_pitch, c.width, &mut to)?;
            // SAFETY: both ranges are either the machine's memory or the host's. The machine's
            // memory is mapped for this many bytes, as checked just now under the lock. For host
            // memory the caller of `with_host` on this transfer vouches.
            unsafe { std::ptr::copy(src, dst, c.width as usize) };
            self.note_access(place, &from, Access::Read, Unwritten::Any);
            self.note_access(place, &to, Access::Write, Unwritten::Any);
        }
        Ok(())
    }

    fn fill(&mut self, place: &CommandContext, c: FillCall) -> Result<(), String> {
        let pattern = c.pattern.to_le_bytes();
        let unit = usize::from(c.unit);
        let mut parts = Vec::new();
        for row in 0..if c.width == 0 { 0 } else { c.rows } {
            let dst =
                self.reach(place, AccessScope::Engine, c.dst + row * c.pitch, c.width, &mut parts)?;
            // SAFETY: the range is the machine's memory, mapped for this many bytes, as checked
            // just now under the lock. References to this memory exist here only, under that lock.
            // A host thread that reads pinned memory meanwhile uses raw pointers.
            let bytes = unsafe { std::slice::from_raw_parts_mut(dst, c.width as usize) };
            if pattern[..unit].iter().all(|&b| b == pattern[0]) {
                bytes.fill(pattern[0]);
            } else {
                bytes
                    .chunks_exact_mut(unit)
                    .for_each(|chunk| chunk.copy_from_slice(&pattern[..unit]));
            }
            self.note_access(place, &parts, Access::Write, Unwritten::Any);
        }
        Ok(())
    }

    fn write_value(&mut self, place: &CommandContext, addr: u64, value: u64) -> Result<(), String> {
        let mut parts = Vec::new();
        let at = self.reach(place, AccessScope::Engine, addr, 8, &mut parts)?;
        if let Some((q, key)) = self.queues.get(&place.queue).zip(parts.first().map(|p| p.key)) {
            self.words.entry(key).or_default().join(&q.clock);
        }
        // SAFETY: eight aligned bytes that are mapped (checked). Other threads read them
        // atomically.
        unsafe { &*at.cast::<AtomicU64>() }.store(value, Ordering::Release);
        Ok(())
    }

    fn wait_value(&mut self, place: &CommandContext, addr: u64, value: u64) -> Outcome {
        let mut parts = Vec::new();
        if let Err(e) = self.reach(place, AccessScope::Engine, addr, 8, &mut parts) {
            return Outcome::Fault(e);
        }
        if self.word(addr).is_none_or(|now| now < value) {
            return Outcome::Pending(Action::WaitValue { addr, value });
        }
        if let Some(clock) = parts.first().and_then(|p| self.words.get(&p.key)).cloned() {
            let nanos = self.nanos;
            self.learn(place.queue, &clock, nanos);
        }
        Outcome::Done(100)
    }

    fn test(&mut self, place: &CommandContext, condition: &Condition) -> Outcome {
        let addr = match condition {
            Condition::Cell(cell) => return Outcome::Tested(cell.load(Ordering::Acquire) != 0),
            Condition::Flag(addr) => *addr,
        };
        let mut parts = Vec::new();
        match self.reach(place, AccessScope::Kernel(place.device), addr, 4, &mut parts) {
            Ok(at) => {
                self.note_access(place, &parts, Access::Read, Unwritten::Any);
                // SAFETY: four bytes that are mapped (checked). No host function runs under the
                // lock, and a queue's own work is over before its next node.
                Outcome::Tested(unsafe { at.cast::<u32>().read_unaligned() } != 0)
            }
            Err(e) => Outcome::Fault(format!("the flag: {e}")),
        }
    }

    fn wait_semaphore(
        &mut self,
        place: &CommandContext,
        id: super::SemaphoreId,
        value: u64,
    ) -> Outcome {
        let Some(s) = self.semaphores.get(&id) else {
            return Outcome::Fail(Error::state(format!(
                "{id:?} was given up before it reached {value}"
            )));
        };
        if s.value < value {
            return match &s.failed {
                Some(cause) => Outcome::Fail(cause.clone()),
                None => Outcome::Pending(Action::WaitSemaphore(id, value)),
            };
        }
        if let Some((clock, nanos)) = s.known(value).map(|r| (r.clock.clone(), r.nanos)) {
            self.learn(place.queue, &clock, nanos);
        }
        Outcome::Done(0)
    }

    /// Frees memory in queue order, after a report of its remaining users.
    fn free_here(&mut self, place: &CommandContext, addr: u64) {
        let Ok(gone) = self.space.allocation(addr) else {
            self.detector.report(ReportKind::UseAfterFree, None, place.operation(), addr, 0);
            return;
        };
        let mut first = self.detector.unknown(&place.clock, gone.key, gone.addr, gone.bytes);
        for (id, q) in &self.queues {
            let touching = |e: &&Entry| e.regions.iter().any(|r| r.1 == gone.region);
            first.extend(q.entries.iter().filter(touching).map(|e| e.operation(*id)));
        }
        for operation in first {
            self.detector.report(
                ReportKind::UseAfterFree,
                Some(operation),
                place.operation(),
                addr,
                gone.bytes,
            );
        }
        self.free_at(addr);
    }

    /// The error of a failed operation.
    pub(super) fn fault(&self, operation: &Operation, text: String) -> Error {
        let name = match operation.node {
            Some(node) => format!("graph node {node} ({})", operation.name),
            None => operation.name.to_string(),
        };
        let queue = operation.queue.and_then(|q| self.queues.get(&QueueId(q)));
        let text = match &self.hint {
            Some(hint) => format!("{text}; {hint}"),
            None => text,
        };
        Fault::new(
            name,
            queue.map_or_else(String::new, |q| q.name.to_string()),
            operation.index,
            text,
        )
        .into()
    }

    pub(super) fn free_at(&mut self, addr: u64) {
        if let Ok(gone) = self.space.free(addr) {
            self.detector.forget(gone.key, gone.bytes);
        }
    }
}

fn result(result: Result<(), String>, nanos: u64) -> Outcome {
    match result {
        Ok(()) => Outcome::Done(nanos),
        Err(e) => Outcome::Fault(e),
    }
}

/// The virtual time to start a kernel, in nanoseconds.
const KERNEL_NANOS: u64 = 2_000;
/// The virtual time to start a copy or a fill, in nanoseconds.
const COPY_NANOS: u64 = 1_000;
