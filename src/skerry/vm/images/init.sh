#!/bin/sh
# The first program of a machine: loads what the kernel needs to see its drives, mounts them and gives over to the agent.
say() { echo "skerry: $*" >/dev/console; }
end() { # a hypervisor that would boot it again says so; the others end it instead, and not all know of power
    case " $asked " in
    *" skerry.poweroff "*) poweroff -f ;;
    *) reboot -f ;;
    esac
}
fail() {
    say "this machine cannot start: $*"
    end
}

mount -t proc proc /proc
mount -t devtmpfs dev /dev
read -r asked </proc/cmdline
for name in @MODULES@; do
    insmod "/modules/$name.ko" || say "the module $name cannot be loaded"
done
case " $asked " in
*" skerry.probe "*)
    say "this kernel runs"
    end
    ;;
esac

tries=0
while [ ! -b /dev/vdb ]; do
    tries=$((tries + 1))
    [ $tries -lt 100 ] || fail "it has no drives"
    sleep 0.05
done
mount -t ext4 -o ro,noatime /dev/vda /root || fail "its root file system is damaged"
if [ ! -d /root/.skerry ]; then # others made it: folders that it lacks are laid below it
    mount -o move /root /image
    mount -t tmpfs -o mode=755 lacking /lacking
    for name in @FOLDERS@; do
        mkdir -p "/lacking/$name"
    done
    mount -t overlay -o ro,lowerdir=/image:/lacking root /root || fail "its root file system lacks folders"
fi
mount -t ext4 -o ro,noatime /dev/vdb /root/.skerry || fail "the agent's file system is damaged"
if [ ! -e /root/.skerry/python/bin ]; then # of a host that has none for us: the image brings it
    mount -o bind /root/usr/lib/skerry/python /root/.skerry/python || fail "its image has no interpreter for the agent"
fi
mount -o move /proc /root/proc
mount -o move /dev /root/dev
mount -t sysfs -o nosuid,nodev,noexec sys /root/sys
mount -t tmpfs -o nosuid,nodev,mode=755 run /root/run
mount -t tmpfs -o nosuid,nodev,mode=1777 tmp /root/tmp
mkdir -p /root/dev/pts /root/dev/shm
mount -t devpts -o nosuid,noexec,gid=5,mode=620,ptmxmode=666 devpts /root/dev/pts
mount -t tmpfs -o nosuid,nodev,mode=1777 shm /root/dev/shm
python=/.skerry/python
exec switch_root /root $python/lib/ld.so --library-path $python/lib $python/bin/python3 -I -S -B /.skerry/agent/machine.py
fail "it has no agent"
