//! The numbers that are not cases here, each with its reason. Such a number concerns a capability
//! that does not exist, or a component that is not a backend and has its own tests.
//!
//! A test checks that every number up to the last one is a case or in this list, and that the named
//! tests exist.

/// The place where a number is tested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Home {
    /// No place: the capability is missing.
    Missing(&'static str),
    /// Tests of another crate.
    Tests {
        /// The file, from the repository's root.
        file: &'static str,
        /// The functions.
        names: &'static [&'static str],
    },
    /// The property is measured and not judged.
    Measured(&'static str),
}

/// A number that is not a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Elsewhere {
    /// The number.
    pub number: u16,
    /// The short statement.
    pub name: &'static str,
    /// The place where the number is tested.
    pub home: Home,
}

const fn missing(number: u16, name: &'static str, why: &'static str) -> Elsewhere {
    Elsewhere { number, name, home: Home::Missing(why) }
}

const fn tests(
    number: u16,
    name: &'static str,
    file: &'static str,
    names: &'static [&'static str],
) -> Elsewhere {
    Elsewhere { number, name, home: Home::Tests { file, names } }
}

const API: &str = "tl/tests/suite/api.rs";
const THREADS: &str = "tl/tests/suite/threads.rs";
const C_ABI: &str = "tl/tests/suite/c_abi.rs";

/// All such numbers, in order.
pub const ELSEWHERE: &[Elsewhere] = &[
    missing(70, "tensors travel as DLPack", "no crate takes or gives DLPack tensors"),
    missing(
        71,
        "memory and events travel to other processes",
        "neither memory nor events can be exported to another process",
    ),
    missing(86, "a launch takes its grid from device memory", "a grid is a number of the host's"),
    Elsewhere {
        number: 122,
        name: "a launch on a parked pool and on a warm one is fast",
        home: Home::Measured("leasehold-workbench bench stream"),
    },
    missing(
        123,
        "structures of another size are taken",
        "the C interface has no structures that could grow",
    ),
    tests(
        124,
        "every declared entry is there",
        C_ABI,
        &["the_header_declares_what_the_library_exports"],
    ),
    missing(
        125,
        "an error is an object with a code",
        "the C interface counts misuse and goes on; no call gives an error object",
    ),
    tests(
        126,
        "unbalanced scopes and frames are harmless",
        API,
        &[
            "frames_close_what_was_left_open_and_extra_exits_do_nothing",
            "a_slot_that_grows_by_one_retains_a_multiple_of_its_size",
            "marks_close_what_error_returns_left_open",
        ],
    ),
    tests(
        127,
        "counts are right with two threads",
        THREADS,
        &[
            "shared_objects_are_counted_right_by_all_threads_and_destroyed_once",
            "no_object_is_freed_by_a_foreign_thread",
        ],
    ),
    missing(
        128,
        "an older client and a newer library agree",
        "the library tells its version and negotiates none",
    ),
];
