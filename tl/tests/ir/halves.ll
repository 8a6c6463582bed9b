; A loop as a compiler with a bug emits it: the temporary %half is released twice, around the creation of %product. The right
; answers are 0.5, 0.25, 0.125; without quarantine the second release hits %product. Returns the number of wrong answers.
declare void @tl_mem_enter_scope()
declare void @tl_mem_exit_scope()
declare void @tl_mem_promote(ptr)
declare void @tl_tensor_release(ptr)
declare void @tl_mem_register_tensor(ptr)
declare i32 @tl_mem_is_registered(ptr)
declare ptr @tl_pool_acquire(i64, i8, i8)
declare void @tl_mem_set_tensor_destructor(ptr)
declare void @tl_mem_set_tensor_describer(ptr)
declare ptr @malloc(i64)
declare void @free(ptr)
declare i64 @tl_get_scope_depth()
declare i64 @tl_get_refcount_count()

; A tensor is a block with one double; all have one key.
define i32 @describe(ptr %tensor, ptr %info) {
  store { i64, i8, i8 } { i64 1, i8 1, i8 0 }, ptr %info
  ret i32 1
}

define ptr @create() {
entry:
  %pooled = call ptr @tl_pool_acquire(i64 1, i8 1, i8 0)
  %none = icmp eq ptr %pooled, null
  br i1 %none, label %make, label %register
make:
  %made = call ptr @malloc(i64 8)
  br label %register
register:
  %tensor = phi ptr [ %pooled, %entry ], [ %made, %make ]
  call void @tl_mem_register_tensor(ptr %tensor)
  ret ptr %tensor
}

define i32 @main() {
entry:
  call void @tl_mem_set_tensor_destructor(ptr @free)
  call void @tl_mem_set_tensor_describer(ptr @describe)
  call void @tl_mem_enter_scope()
  %x0 = call ptr @create()
  store double 1.0, ptr %x0
  br label %loop

loop:
  %i = phi i32 [ 0, %entry ], [ %i1, %next ]
  %x = phi ptr [ %x0, %entry ], [ %product, %next ]
  %want = phi double [ 0.5, %entry ], [ %want1, %next ]
  %bad = phi i32 [ 0, %entry ], [ %bad1, %next ]
  call void @tl_mem_enter_scope()
  %half = call ptr @create()
  store double 0.5, ptr %half
  %h = load double, ptr %half
  call void @tl_tensor_release(ptr %half)
  %product = call ptr @create()
  %xv = load double, ptr %x
  %p = fmul double %xv, %h
  store double %p, ptr %product
  call void @tl_tensor_release(ptr %half)
  %alive = call i32 @tl_mem_is_registered(ptr %product)
  %gone = icmp eq i32 %alive, 0
  br i1 %gone, label %lost, label %check

lost:
  br label %next

check:
  %r = load double, ptr %product
  %ok = fcmp oeq double %r, %want
  %wrong = select i1 %ok, i32 0, i32 1
  br label %next

next:
  %add = phi i32 [ 1, %lost ], [ %wrong, %check ]
  %bad1 = add i32 %bad, %add
  %want1 = fmul double %want, 0.5
  call void @tl_mem_promote(ptr %product)
  call void @tl_mem_exit_scope()
  %i1 = add i32 %i, 1
  ; Once an answer is lost the next turn would read what is dead.
  %stop = icmp sgt i32 %bad1, 0
  %done = icmp sge i32 %i1, 3
  %end = or i1 %stop, %done
  br i1 %end, label %out, label %loop

out:
  call void @tl_mem_exit_scope()
  %depth = call i64 @tl_get_scope_depth()
  %deep = icmp ne i64 %depth, 1
  %live = call i64 @tl_get_refcount_count()
  %leak = icmp ne i64 %live, 0
  %either = or i1 %deep, %leak
  %more = zext i1 %either to i32
  %result = add i32 %bad1, %more
  ret i32 %result
}
