//! The kernel that sets conditions of graphs, loaded into a context at its first use.
//!
//! Each conditional node has such a kernel in front of it. A loop has another one at the end of its
//! body.
//!
//! This module must not know plans.

use super::driver_context::DriverContext;
use crate::driver::condition::{DEPENDENT_PTX, PTX, SET_CONDITION};
use crate::driver::ops::{
    Launch, NativeCondition, NativeFunction, NativeGraph, NativeModule, NativeNode, NativePartition,
};
use leasehold_core::Result;
use leasehold_core::sync::Arc;
use leasehold_hal::Binding;
use std::fmt;

/// The nodes in front of a kernel.
#[derive(Clone, Copy)]
pub(crate) enum After<'a> {
    /// All are over before the kernel begins.
    All(&'a [NativeNode]),
    /// The kernel waits itself for this one, which is a kernel.
    Dependent(NativeNode),
}

/// The loaded kernel of a context.
pub struct ConditionSetter {
    context: Arc<DriverContext>,
    module: NativeModule,
    function: NativeFunction,
    /// The kernel waits itself for the one in front of it.
    waits: bool,
}

impl ConditionSetter {
    /// Loads the kernel for a compute capability. Blocks while the driver compiles it.
    pub(crate) fn load(context: &Arc<DriverContext>, (major, _): (u32, u32)) -> Result<Self> {
        let waits = major >= 9;
        let image = if waits { DEPENDENT_PTX } else { PTX };
        let module = context.within(|ops| ops.module_load(image.as_bytes()))?;
        let (context, function) = (context.clone(), NativeFunction::NULL);
        // From here on the drop unloads the module.
        let mut setter = Self { context, module, function, waits };
        // SAFETY: the module was loaded just now.
        setter.function = setter
            .context
            .within(|ops| unsafe { ops.module_function(module, SET_CONDITION, &[]) })?;
        Ok(setter)
    }

    /// Adds a node that sets a condition to the value of a flag. It may begin early if a kernel is
    /// all that it comes after.
    ///
    /// # Safety
    /// - The graph, its nodes and the condition are of this context, and have no other user now.
    /// - The flag is memory that the graph may read whenever it runs. The graph ends before the
    ///   setter does.
    pub(crate) unsafe fn add(
        &self,
        graph: NativeGraph,
        after: After<'_>,
        condition: NativeCondition,
        flag: &Binding,
    ) -> Result<NativeNode> {
        let mut args = [0; 16];
        args[..8].copy_from_slice(&flag.addr.to_le_bytes());
        args[8..].copy_from_slice(&condition.0.to_le_bytes());
        let launch = Launch {
            early: None,
            attributes: None,
            function: self.function,
            grid: [1; 3],
            block: [1; 3],
            shared: 0,
            args: &args,
            bindings: std::slice::from_ref(flag),
        };
        self.context.within(|ops| match after {
            // SAFETY: the caller vouches for graph, nodes and flag. The kernel reads the flag
            // alone, after its wait. Its arguments are the two that it takes.
            After::Dependent(kernel) if self.waits => unsafe {
                ops.graph_add_dependent_kernel(graph, kernel, &launch, NativePartition::NULL)
            },
            // SAFETY: as above.
            After::Dependent(kernel) => unsafe {
                ops.graph_add_kernel(graph, &[kernel], &launch, NativePartition::NULL)
            },
            // SAFETY: as above.
            After::All(after) => unsafe {
                ops.graph_add_kernel(graph, after, &launch, NativePartition::NULL)
            },
        })
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
