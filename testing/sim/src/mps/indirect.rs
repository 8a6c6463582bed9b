//! Indirect command buffers and capture scopes of the simulated driver.
//!
//! This module must not know how work runs.

use super::tables::{IndirectState, Object, ScopeState};
use super::work::EncoderState;
use super::{Effect, SimDriver, broken};
use crate::KernelCall;
use leasehold_core::{Error, Result};
use leasehold_mps::driver::ops::{
    CaptureOps, IndirectCommand, IndirectOps, NativeCaptureScope, NativeDevice, NativeIndirect,
    NativeQueue,
};
use std::ops::Range;

/// The most commands of an indirect command buffer.
const COMMANDS_MAX: u32 = 16_384;
/// The most bindings of a command.
const BUFFERS_MAX: u32 = 31;

/// A command of an indirect command buffer.
#[derive(Clone)]
pub(super) struct Stored {
    pub(super) call: KernelCall,
    pub(super) barrier: bool,
    /// The numbers of the objects that the command uses.
    pub(super) uses: Vec<u64>,
    /// The addresses of memory that must be resident.
    pub(super) needed: Vec<u64>,
}

impl IndirectOps for SimDriver {
    unsafe fn indirect_create(
        &self,
        device: NativeDevice,
        commands: u32,
        buffers: u32,
    ) -> Result<NativeIndirect> {
        let device = self.lock().device(device)?;
        if !(1..=COMMANDS_MAX).contains(&commands) || buffers > BUFFERS_MAX {
            return Err(Error::invalid(format!(
                "{commands} indirect commands of {buffers} buffers: want 1 to {COMMANDS_MAX}, and at \
                 most {BUFFERS_MAX}"
            )));
        }
        self.enter("newIndirectCommandBufferWithDescriptor", device)?;
        let commands = std::iter::repeat_with(|| None).take(commands as usize).collect();
        let state = IndirectState { device, buffers, commands };
        Ok(NativeIndirect(self.lock().add(Object::Indirect(state))))
    }

    unsafe fn indirect_set(
        &self,
        indirect: NativeIndirect,
        index: u32,
        command: &IndirectCommand<'_>,
    ) -> Result<()> {
        const API: &str = "indirectComputeCommandAtIndex";
        self.count(API, self.device_of(indirect));
        let mut tables = self.lock();
        let state = tables.indirect(indirect.0)?;
        let slots = state.commands.len();
        if index as usize >= slots || command.buffers.len() > state.buffers as usize {
            let text = format!("{API}: index {index} of {slots}, or too many buffers");
            return Err(broken(&mut tables, Effect::Abort, text));
        }
        let pipeline = tables.pipeline(command.pipeline.0)?.clone();
        if !pipeline.indirect {
            let text = format!("{API}: pipeline {} is not for it", pipeline.kernel.name);
            return Err(broken(&mut tables, Effect::Abort, text));
        }
        let (mut bound, mut needed) = (Vec::new(), Vec::new());
        for (buffer, offset) in command.buffers {
            let buffer = tables.buffer(buffer.0)?;
            bound.push((buffer.addr + offset, buffer.bytes.saturating_sub(*offset)));
            needed.push(buffer.memory.addr);
        }
        let at = |i: u32| bound.get(i as usize).copied();
        let call = match EncoderState::call(&pipeline, &command.dispatch, &at, None, 0) {
            Ok(call) => call,
            Err(text) => return Err(broken(&mut tables, Effect::Abort, text)),
        };
        let uses = command.buffers.iter().map(|b| b.0.0).chain([command.pipeline.0]).collect();
        let stored = Stored { call, barrier: command.barrier, uses, needed };
        tables.indirect_mut(indirect.0)?.commands[index as usize] = Some(stored);
        Ok(())
    }

    unsafe fn indirect_reset(&self, indirect: NativeIndirect, range: Range<u32>) -> Result<()> {
        const API: &str = "resetWithRange";
        self.count(API, self.device_of(indirect));
        let mut tables = self.lock();
        let commands = &mut tables.indirect_mut(indirect.0)?.commands;
        match commands.get_mut(range.start as usize..range.end as usize) {
            Some(slots) => slots.iter_mut().for_each(|slot| *slot = None),
            None => {
                return Err(broken(&mut tables, Effect::Abort, format!("{API}: {range:?}")));
            }
        }
        Ok(())
    }
}

impl CaptureOps for SimDriver {
    unsafe fn scope_create(&self, queue: NativeQueue, _: &str) -> Result<NativeCaptureScope> {
        let device = self.device_of(queue);
        self.enter("newCaptureScopeWithCommandQueue", device)?;
        let mut tables = self.lock();
        tables.queue(queue.0)?;
        Ok(NativeCaptureScope(tables.add(Object::Scope(ScopeState { device, open: false }))))
    }

    unsafe fn scope_begin(&self, scope: NativeCaptureScope) -> Result<()> {
        self.set_scope(scope, true)
    }

    unsafe fn scope_end(&self, scope: NativeCaptureScope) -> Result<()> {
        self.set_scope(scope, false)
    }
}

impl SimDriver {
    fn set_scope(&self, scope: NativeCaptureScope, open: bool) -> Result<()> {
        let api = if open { "beginScope" } else { "endScope" };
        self.count(api, self.device_of(scope));
        let mut tables = self.lock();
        let state = tables.scope_mut(scope.0)?;
        if state.open == open {
            let text = format!("{api} of a scope that is in this state already");
            return Err(broken(&mut tables, Effect::Undefined, text));
        }
        state.open = open;
        Ok(())
    }
}
