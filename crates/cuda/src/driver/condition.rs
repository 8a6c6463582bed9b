//! The code of the kernel that sets a condition of a graph to the value of a flag.
//!
//! A conditional node decides by a word of the driver's, which kernels alone can set.
//!
//! This module must not know graphs.

/// The entry of the kernel: a pointer to the flag, and the condition.
///
/// A simulated driver knows the kernel by this name.
pub const SET_CONDITION: &str = "leasehold_set_condition";

/// The kernel as PTX for a target. The driver has the function that it calls.
macro_rules! ptx {
    ($target:literal, $first:literal) => {
        concat!(
            $target,
            "
.address_size 64
.extern .func cudaGraphSetConditional(.param .b64 condition, .param .b32 value);
.visible .entry leasehold_set_condition(.param .u64 flag, .param .u64 condition)
{
    .reg .b32 %value;
    .reg .b64 %flag, %condition;
    ",
            $first,
            "
    ld.param.u64 %flag, [flag];
    ld.param.u64 %condition, [condition];
    cvta.to.global.u64 %flag, %flag;
    ld.global.u32 %value, [%flag];
    {
        .param .b64 first;
        .param .b32 second;
        st.param.b64 [first], %condition;
        st.param.b32 [second], %value;
        call.uni cudaGraphSetConditional, (first, second);
    }
    ret;
}
"
        )
    };
}

/// The kernel as PTX.
pub const PTX: &str = ptx!(".version 7.0\n.target sm_52", "");

/// The kernel for devices of compute capability 9.0 and newer. It waits itself for the kernel in
/// front of it, so it may begin before that one is over.
pub const DEPENDENT_PTX: &str = ptx!(".version 7.8\n.target sm_90", "griddepcontrol.wait;");
