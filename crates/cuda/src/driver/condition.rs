//! The code of the kernel that sets a condition of a graph to the value of a flag.
//!
//! A conditional node decides by a word of the driver's, which kernels alone can set.
//!
//! This module must not know graphs.

/// The entry of the kernel: a pointer to the flag, and the condition.
///
/// A simulated driver knows the kernel by this name.
pub const SET_CONDITION: &str = "leasehold_set_condition";

/// The kernel as PTX. The driver has the function that it calls.
pub const PTX: &str = "
.version 7.0
.target sm_52
.address_size 64
.extern .func cudaGraphSetConditional(.param .b64 condition, .param .b32 value);
.visible .entry leasehold_set_condition(.param .u64 flag, .param .u64 condition)
{
    .reg .b32 %value;
    .reg .b64 %flag, %condition;
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
";
