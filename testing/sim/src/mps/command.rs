//! Queues and command buffers of the simulated driver.
//!
//! This module must not know how work runs.

use super::tables::{Object, QueueState};
use super::work::{CommandState, Handlers, Part};
use super::{Effect, Inner, SimDriver, broken, outside_handler, told};
use crate::{EventId, SemaphoreId};
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::{Error, Result};
use leasehold_mps::driver::ops::{
    AnyEvent, CommandBufferDesc, CommandBufferOps, CompletedHandler, Completion,
    NativeCommandBuffer, NativeDevice, NativeQueue, NativeResidencySet, QueueOps, Status, code,
};
use std::collections::BTreeSet;

/// The most residency sets of a queue.
const SETS_MAX: usize = 32;

impl QueueOps for SimDriver {
    unsafe fn queue_create(
        &self,
        device: NativeDevice,
        buffers: u32,
        label: &str,
    ) -> Result<NativeQueue> {
        const API: &str = "newCommandQueueWithMaxCommandBufferCount";
        let device = self.lock().device(device)?;
        self.enter(API, device)?;
        let machine = &self.0.machine;
        let mut tables = self.lock();
        if tables.census().queues >= self.0.config.queues as usize {
            return Err(Error::Driver { api: API, code: 0, name: "nil".into() });
        }
        let front = machine.queue_create(device).map_err(|e| told(API, e))?;
        machine.queue_set_name(front, label)?;
        let passed = machine.event_create(device, false).map_err(|e| {
            drop(machine.queue_destroy(front));
            told(API, e)
        })?;
        Ok(NativeQueue(tables.add(Object::Queue(QueueState {
            device,
            label: label.to_owned(),
            most: buffers.max(1) as usize,
            front,
            passed,
            in_flight: Vec::new(),
            last: None,
            made: 0,
            commits: 0,
            sets: BTreeSet::new(),
        }))))
    }

    unsafe fn queue_add_set(&self, queue: NativeQueue, set: NativeResidencySet) -> Result<()> {
        self.count("addResidencySet", self.device_of(queue));
        let mut tables = self.lock();
        tables.set(set.0)?;
        let state = tables.queue_mut(queue.0)?;
        state.sets.insert(set.0);
        if state.sets.len() > SETS_MAX {
            state.sets.remove(&set.0);
            let text = format!("addResidencySet: more than {SETS_MAX} sets of a queue");
            return Err(broken(&mut tables, Effect::Abort, text));
        }
        Ok(())
    }

    unsafe fn queue_remove_set(&self, queue: NativeQueue, set: NativeResidencySet) -> Result<()> {
        self.count("removeResidencySet", self.device_of(queue));
        self.lock().queue_mut(queue.0)?.sets.remove(&set.0);
        Ok(())
    }
}

/// The end of a command buffer, as the host sees it.
enum End {
    /// The host knows the outcome.
    Seen(Completion),
    /// The event that the end records.
    Pending(EventId),
    NotCommitted,
}

impl Inner {
    /// Calls the handlers of a command buffer whose work is over.
    fn completed(&self, number: u64) {
        let handlers = self.tables.lock().take_handlers(&self.machine, number);
        handlers.into_iter().for_each(Handlers::call);
    }
}

impl SimDriver {
    fn end(&self, buffer: NativeCommandBuffer) -> Result<End> {
        let tables = self.lock();
        let command = tables.command(buffer.0)?;
        Ok(match (&command.outcome, command.done) {
            (Some(outcome), _) => End::Seen(outcome.clone()),
            (None, Some(done)) => End::Pending(done),
            (None, None) => End::NotCommitted,
        })
    }

    /// Notes that the host knows the end of a command buffer. The machine calls no handlers of a
    /// lost device, so this call does.
    fn observe(&self, number: u64, device: u32) {
        self.lock().observe(&self.0.machine, number);
        if self.0.machine.device_status(device).is_err() {
            let uncalled = self.lock().uncalled(device);
            uncalled.into_iter().for_each(|number| self.0.completed(number));
        }
    }

    /// Queries the end of a command buffer. Steps the machine.
    fn query(&self, buffer: NativeCommandBuffer) -> Result<End> {
        let end = self.end(buffer)?;
        let End::Pending(done) = end else { return Ok(end) };
        match self.0.machine.event_query(done) {
            Ok(false) => Ok(end),
            // Over, or lost, or another thread has seen the end.
            _ => {
                self.observe(buffer.0, self.device_of(buffer));
                self.end(buffer)
            }
        }
    }

    /// The semaphore of an event, which a command buffer of `device` may use.
    fn semaphore(&self, event: AnyEvent, device: u32) -> Result<(u64, SemaphoreId)> {
        let number = match event {
            AnyEvent::Event(event) => event.0,
            AnyEvent::Shared(event) => event.0,
        };
        let mut tables = self.lock();
        let state = *tables.event(number)?;
        if !state.shared && state.device != device {
            let text = "an MTLEvent of another device";
            return Err(broken(&mut tables, Effect::Abort, text));
        }
        Ok((number, state.semaphore))
    }

    fn encode_event(
        &self,
        api: &'static str,
        buffer: NativeCommandBuffer,
        event: AnyEvent,
        part: impl FnOnce(SemaphoreId) -> Part,
    ) -> Result<()> {
        let device = self.device_of(buffer);
        self.count(api, device);
        let (number, semaphore) = self.semaphore(event, device)?;
        let mut tables = self.lock();
        let command = tables.command_mut(buffer.0)?;
        if command.open.is_some() || command.committed {
            let what = if command.committed { "after commit" } else { "with an open encoder" };
            let text = format!("{api} {what} on {}", command.name);
            return Err(broken(&mut tables, Effect::Abort, text));
        }
        command.uses.insert(number);
        command.parts.push(part(semaphore));
        Ok(())
    }
}

impl CommandBufferOps for SimDriver {
    unsafe fn command_buffer(
        &self,
        queue: NativeQueue,
        desc: CommandBufferDesc,
    ) -> Result<NativeCommandBuffer> {
        const API: &str = "commandBufferWithDescriptor";
        self.enter(API, self.device_of(queue))?;
        outside_handler(&mut self.lock(), API)?;
        let machine = &self.0.machine;
        loop {
            let mut tables = self.lock();
            let state = tables.queue(queue.0)?;
            let work = |b: &&u64| tables.work(**b).is_some_and(|c| !c.is_over(machine));
            let open: Vec<u64> = state.in_flight.iter().filter(work).copied().collect();
            if open.len() < state.most {
                let (device, index) = (state.device, state.made + 1);
                let command = CommandState::new(device, queue.0, index, &state.label, desc);
                let number = tables.add(Object::Command(Box::new(command)));
                let state = tables.queue_mut(queue.0)?;
                state.made = index;
                state.in_flight.push(number);
                return Ok(NativeCommandBuffer(number));
            }
            // The call blocks until the oldest one is over.
            let oldest = open.iter().find_map(|b| Some((*b, tables.work(*b)?.done?)));
            let Some((number, done)) = oldest else {
                let text = format!(
                    "{API}: all {} command buffers of queue {} are uncommitted",
                    state.most, state.label
                );
                return Err(broken(&mut tables, Effect::DeadLock, text));
            };
            drop(tables);
            match machine.event_synchronize(done, None) {
                Ok(()) | Err(Error::NotFound(_)) => self.observe(number, self.device_of(queue)),
                Err(error) => return Err(told(API, error)),
            }
        }
    }

    unsafe fn buffer_set_label(&self, buffer: NativeCommandBuffer, label: &str) -> Result<()> {
        self.count("setLabel", self.device_of(buffer));
        let mut tables = self.lock();
        let command = tables.command_mut(buffer.0)?;
        command.name = format!("command buffer {} ({label})", command.index);
        Ok(())
    }

    unsafe fn on_completed(
        &self,
        buffer: NativeCommandBuffer,
        handler: CompletedHandler,
    ) -> Result<()> {
        self.count("addCompletedHandler", self.device_of(buffer));
        let mut tables = self.lock();
        let command = tables.command_mut(buffer.0)?;
        if command.committed {
            let text = format!("addCompletedHandler after commit on {}", command.name);
            return Err(broken(&mut tables, Effect::Abort, text));
        }
        command.handlers.push(handler);
        Ok(())
    }

    unsafe fn encode_wait(
        &self,
        buffer: NativeCommandBuffer,
        event: AnyEvent,
        value: u64,
    ) -> Result<()> {
        self.encode_event("encodeWaitForEvent", buffer, event, |s| Part::Wait(s, value))
    }

    unsafe fn encode_signal(
        &self,
        buffer: NativeCommandBuffer,
        event: AnyEvent,
        value: u64,
    ) -> Result<()> {
        self.encode_event("encodeSignalEvent", buffer, event, |s| Part::Signal(s, value))
    }

    unsafe fn commit(&self, buffer: NativeCommandBuffer) -> Result<()> {
        const API: &str = "commit";
        let injected = match self.enter(API, self.device_of(buffer)) {
            Ok(()) => None,
            Err(Error::OutOfMemory(why)) => Some((code::OUT_OF_MEMORY, why.to_string())),
            Err(Error::Driver { code, name, .. }) => Some((code, name.into_string())),
            Err(error) => Some((code::DEVICE_REMOVED, error.to_string())),
        };
        let inner = Arc::downgrade(&self.0);
        let number = buffer.0;
        let completed = move || {
            if let Some(inner) = inner.upgrade() {
                inner.completed(number);
            }
        };
        let mut tables = self.lock();
        outside_handler(&mut tables, API)?;
        let machine = &self.0.machine;
        let runs = tables.commit(machine, self.0.physical, number, injected, completed)?;
        drop(tables);
        if !runs {
            let device = self.device_of(buffer);
            self.0.completed(number);
            self.observe(number, device);
        }
        Ok(())
    }

    unsafe fn status(&self, buffer: NativeCommandBuffer) -> Result<Status> {
        self.count("status", self.device_of(buffer));
        Ok(match self.query(buffer)? {
            End::Seen(Completion { error: None, .. }) => Status::Completed,
            End::Seen(_) => Status::Error,
            End::Pending(_) => Status::Committed,
            End::NotCommitted => Status::NotEnqueued,
        })
    }

    unsafe fn completion(&self, buffer: NativeCommandBuffer) -> Result<Completion> {
        self.count("error", self.device_of(buffer));
        match self.query(buffer)? {
            End::Seen(outcome) => Ok(outcome),
            _ => Err(Error::state("the command buffer is not over")),
        }
    }

    unsafe fn wait_completed(&self, buffer: NativeCommandBuffer) -> Result<()> {
        const API: &str = "waitUntilCompleted";
        self.count(API, self.device_of(buffer));
        outside_handler(&mut self.lock(), API)?;
        let machine = &self.0.machine;
        match self.end(buffer)? {
            End::NotCommitted => {
                let text = format!("{API} before commit");
                return Err(broken(&mut self.lock(), Effect::DeadLock, text));
            }
            End::Pending(done) => match machine.event_synchronize(done, None) {
                Ok(()) | Err(Error::NotFound(_) | Error::DeviceLost { .. }) => {}
                Err(error) => return Err(told(API, error)),
            },
            End::Seen(_) => {}
        }
        self.observe(buffer.0, self.device_of(buffer));
        let called = self.lock().command(buffer.0)?.called.clone();
        machine.wait_until(None, || called.load(Ordering::Acquire))
    }
}
