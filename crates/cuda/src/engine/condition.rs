//! The kernel that sets conditions of graphs, loaded into a context at its first use.
//!
//! Each conditional node has such a kernel in front of it. A loop has another one at the end of its
//! body.
//!
//! This module must not know plans.

use super::driver_context::DriverContext;
use crate::driver::condition::{PTX, SET_CONDITION};
use crate::driver::ops::{
    Launch, NativeCondition, NativeFunction, NativeGraph, NativeModule, NativeNode,
};
use leasehold_core::Result;
use leasehold_core::sync::Arc;
use leasehold_hal::Binding;
use std::fmt;

/// The loaded kernel of a context.
pub struct ConditionSetter {
    context: Arc<DriverContext>,
    module: NativeModule,
    function: NativeFunction,
}

impl ConditionSetter {
    /// Loads the kernel. Blocks while the driver compiles it.
    pub(crate) fn load(context: &Arc<DriverContext>) -> Result<Self> {
        let module = context.within(|ops| ops.module_load(PTX.as_bytes()))?;
        // From here on the drop unloads the module.
        let mut setter = Self { context: context.clone(), module, function: NativeFunction::NULL };
        // SAFETY: the module was loaded just now.
        setter.function =
            context.within(|ops| unsafe { ops.module_function(module, SET_CONDITION) })?;
        Ok(setter)
    }

    /// Adds a node that sets a condition to the value of a flag.
    ///
    /// # Safety
    /// - The graph, its nodes and the condition are of this context, and have no other user now.
    /// - The flag is memory that the graph may read whenever it runs. The graph ends before the
    ///   setter does.
    pub(crate) unsafe fn add(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        condition: NativeCondition,
        flag: &Binding,
    ) -> Result<NativeNode> {
        let mut args = [0; 16];
        args[..8].copy_from_slice(&flag.addr.to_le_bytes());
        args[8..].copy_from_slice(&condition.0.to_le_bytes());
        let launch = Launch {
            early: None,
            function: self.function,
            grid: [1; 3],
            block: [1; 3],
            shared: 0,
            args: &args,
            bindings: std::slice::from_ref(flag),
        };
        // SAFETY: the caller vouches for graph, nodes and flag. The kernel reads the flag alone,
        // and its arguments are the two that it takes.
        self.context.within(|ops| unsafe { ops.graph_add_kernel(graph, after, &launch) })
    }
}

impl Drop for ConditionSetter {
    fn drop(&mut self) {
        // SAFETY: the module was loaded for this value, and the graphs that run its function hold
        // the value.
        self.context.release_or_log(|ops| unsafe { ops.module_unload(self.module) });
    }
}

impl fmt::Debug for ConditionSetter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConditionSetter({:#x})", self.function.0)
    }
}
