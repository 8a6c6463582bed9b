//! Tests of the driver's words about a call that failed.

use super::*;

fn say(words: &str) {
    // SAFETY: the text has so many bytes.
    unsafe { hear(std::ptr::null_mut(), 0, words.as_ptr().cast(), words.len()) }
}

#[test]
fn words_are_those_of_the_last_call_alone() {
    say("Requested 0 byte allocation.");
    say("twice\n");
    say("Returning 1 (CUDA_ERROR_INVALID_VALUE) from cuMemAlloc_v2");
    assert_eq!(take("cuMemAlloc_v2", 1).unwrap(), "Requested 0 byte allocation; twice");
    assert_eq!(take("cuMemAlloc_v2", 1), None);
    say("of a call whose failure nobody asked for");
    say("Returning 1 (CUDA_ERROR_INVALID_VALUE) from cuMemFree_v2");
    say("Returning 1 (CUDA_ERROR_INVALID_VALUE) from cuMemAlloc_v2");
    assert_eq!(take("cuMemAlloc_v2", 1), None);
    say("another call's");
    say("Returning 1 (CUDA_ERROR_INVALID_VALUE) from cuMemFree_v2");
    assert_eq!(take("cuMemAlloc_v2", 1), None);
}

#[test]
fn words_are_bounded() {
    for _ in 0..100 {
        say("un mot accentué, à chaque fois, ");
    }
    say("Returning 2 (CUDA_ERROR_OUT_OF_MEMORY) from cuMemCreate");
    assert!(take("cuMemCreate", 2).unwrap().len() <= MOST);
    // SAFETY: null is allowed.
    unsafe { hear(std::ptr::null_mut(), 0, std::ptr::null(), 5) };
    for odd in ["", "Returning", "Returning x (y) from z", "Returning 1 (", "Returning 1 (A) of"] {
        say(odd);
    }
    say("Returning 3 (A) from f");
    assert!(take("f", 3).unwrap().contains("Returning 1 (A) of"));
}
