# docs/install.md, "Removing it".
systemctl disable --now gemini-hpc-controller
systemctl disable gemini-hpc-boot
sed -i '/gemini-hpc/d; /^PrologFlags=Alloc/d' /etc/slurm/slurm.conf
rm /etc/slurm/plugstack.conf.d/gemini-hpc.conf
systemctl restart slurmctld slurmd
dpkg --purge gemini-hpc-node gemini-hpc-controller gemini-hpc-spank-24.11 gemini-hpc
umount -lR /run/gemini-hpc
rm -rf /etc/gemini-hpc /var/lib/gemini-hpc /run/gemini-hpc* /var/lib/slurm/slurmctld/gemini-hpc.lock
# the reaper ends by itself once nothing is left to sweep
for _ in $(seq 120); do
  scopes=$(systemctl list-units 'geminihpc*.scope' --no-legend)
  [ -n "$scopes" ] || break
  sleep 1
done
[ -z "$scopes" ] || { echo "left behind: $scopes"; exit 1; }
left=$(find / -xdev \( -path /srv -o -path /proc -o -path /sys \) -prune -o -name '*gemini*' -not -name gemini-hpc-root.json -print)
[ -z "$left" ] || { echo "left behind: $left"; exit 1; }
